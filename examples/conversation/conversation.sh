#!/bin/sh
# The same as conversation.py, in curl.
# Usage: API_KEY=cfd_... [URL=http://127.0.0.1:8000] [OUT=folder] examples/conversation/conversation.sh
set -eu
url=${URL:-http://127.0.0.1:8000}/api/v1/sessions
out=${OUT:-.}
here=$(dirname "$0")

ask() { curl -sS --fail-with-body -H "X-API-Key: $API_KEY" "$@"; }

# Run one cell and show what came of it. Ends with 3 where its sandbox was a new one.
run() {
    python3 -c 'import json, sys; print(json.dumps({"code": sys.stdin.read()}))' < "$1" |
        ask -H 'Content-Type: application/json' --data-binary @- "$url/$session/executions" |
        python3 -c 'import json, sys
answer = json.load(sys.stdin)
print(sys.argv[1] + ":", answer["status"])
print(answer["stdout"], end="")
print(*(output.get("text/plain", "(a picture)") for output in answer["outputs"]), sep="\n")
print(*answer["stderr"].splitlines()[-1:])
sys.exit(3 if answer["restored"] else 0)' "$(basename "$1")"
}

session=$(ask -H 'Content-Type: application/json' -d '{"metadata": {"about": "zones"}}' "$url" |
    python3 -c 'import json, sys; print(json.load(sys.stdin)["id"])')
ask -T "$here/zones.csv" -H 'Content-Type: application/octet-stream' \
    "$url/$session/files/content?path=zones.csv" > /dev/null
for cell in "$here"/cells/*.py; do
    if [ "$(basename "$cell")" = 5-furthest.py ]; then
        echo 'The service may be restarted now. Enter goes on.'
        read -r _ || true
    fi
    came=0
    run "$cell" || came=$?
    if [ "$came" = 3 ]; then
        echo 'The sandbox was gone: its files are back, its variables are not.'
        for again in "$here"/cells/*.py; do
            run "$again"
            [ "$again" != "$cell" ] || break
        done
    elif [ "$came" != 0 ]; then
        exit "$came"
    fi
done
for name in furthest.json zones.png; do
    ask -o "$out/$name" "$url/$session/files/content?path=$name"
    echo "written: $out/$name"
done
ask -X DELETE "$url/$session"
