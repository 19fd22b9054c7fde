# A bash that runs one piece of code after the other, and keeps what they leave behind. It is given
# to bash as text, with the numbers of two descriptors that no program is likely to use: for the
# job and for the report. Where code ends the shell itself, as `exit` and `set -e` do, a new shell
# in the same process takes over: with its variables, functions, aliases, options and folder, but
# without its list of jobs, its traps and what was read-only.

_cofferdam_in=$1 _cofferdam_out=$2 _cofferdam_state=$3

_cofferdam_report() {
  builtin local text length
  builtin printf -v text '{"type":"%s","number":%s,"exit_code":%s,"parts":[]}' "$1" "${2:-0}" "${3:-0}"
  builtin printf -v length '%02x' "${#text}"
  builtin printf "\\0\\0\\0\\x$length%s" "$text" >&"$_cofferdam_out"
}

# The environment of one run: as many pairs as are said, and what they take the place of.
_cofferdam_give() {
  builtin local _cofferdam_pair
  _cofferdam_names=() _cofferdam_former=()
  while (( ${#_cofferdam_names[@]} < $1 )) && IFS= builtin read -r -d '' -u "$_cofferdam_in" _cofferdam_pair; do
    _cofferdam_names+=("${_cofferdam_pair%%=*}")
    _cofferdam_former+=("$(builtin declare -p "${_cofferdam_pair%%=*}" 2>/dev/null)")
    # An array would only have its first element changed.
    builtin unset -v "${_cofferdam_pair%%=*}" 2>/dev/null
    builtin export "$_cofferdam_pair"
  done
}

_cofferdam_take_back() {
  builtin local _cofferdam_at
  for _cofferdam_at in "${!_cofferdam_names[@]}"; do
    builtin unset -v "${_cofferdam_names[_cofferdam_at]}"
    builtin eval "${_cofferdam_former[_cofferdam_at]/#declare/declare -g}"
  done 2>/dev/null
  _cofferdam_names=() _cofferdam_former=()
}

_cofferdam_carry_over() {
  { _cofferdam_code=$? _cofferdam_flags=$-; builtin trap : INT; builtin set +eux; builtin trap - EXIT; } 2>/dev/null
  _cofferdam_take_back
  {
    builtin declare -p | command -p grep -av '^declare -[a-zA-Z]*r'
    builtin declare -f
    builtin alias -p
    builtin shopt -p
  } > "$_cofferdam_state" 2>/dev/null
  exec "$BASH" --norc --noprofile -c "$BASH_EXECUTION_STRING" bash "$_cofferdam_in" "$_cofferdam_out" "$_cofferdam_state"
}

_cofferdam_ended() {
  _cofferdam_report done "$_cofferdam_number" "$_cofferdam_code"
}

if [[ $_cofferdam_state ]]; then
  builtin source "$_cofferdam_state" 2>/dev/null
  command -p rm -f -- "$_cofferdam_state"
  _cofferdam_ended
else
  _cofferdam_report ready
fi
builtin set --

while builtin trap : INT; IFS=' ' builtin read -r -u "$_cofferdam_in" _cofferdam_number _cofferdam_size _cofferdam_given _cofferdam_count _cofferdam_state; do
  _cofferdam_text=$(command -p head -c "$_cofferdam_size" <&"$_cofferdam_in"; builtin printf x)
  if [[ $_cofferdam_given != - ]]; then
    ARGUMENTS=$(command -p head -c "$_cofferdam_given" <&"$_cofferdam_in"; builtin printf x)
    builtin export ARGUMENTS="${ARGUMENTS%x}"
  fi
  _cofferdam_text=${_cofferdam_text%x}
  _cofferdam_give "$_cofferdam_count"
  for _cofferdam_flag in e u x; do
    [[ $_cofferdam_flags == *$_cofferdam_flag* ]] && _cofferdam_text="builtin set -$_cofferdam_flag; $_cofferdam_text"
  done
  builtin trap _cofferdam_carry_over EXIT
  builtin trap 'builtin exit 130' INT
  _cofferdam_report began "$_cofferdam_number"
  # From a file, so that messages have the code's own line numbers.
  builtin source <(builtin printf %s "$_cofferdam_text")
  { _cofferdam_code=$? _cofferdam_flags=$-; builtin trap : INT; builtin set +eux; builtin trap - EXIT; } 2>/dev/null
  _cofferdam_take_back
  _cofferdam_ended
done
