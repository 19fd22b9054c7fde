#!/bin/sh
# Summarises a year of Seattle's weather in a sandbox and fetches the chart it drew.
# Usage: API_KEY=cfd_... [URL=http://127.0.0.1:8000] [OUT=folder] examples/weather/run.sh
set -eu
url=${URL:-http://127.0.0.1:8000}
out=${OUT:-.}
here=$(dirname "$0")

answer=$(python3 "$here/request.py" |
    curl -sS --fail-with-body -H "X-API-Key: $API_KEY" -H 'Content-Type: application/json' \
        --data-binary @- "$url/api/v1/executions")
printf '%s\n' "$answer" | python3 -m json.tool

printf '%s' "$answer" |
    python3 -c 'import json, sys
for artifact in json.load(sys.stdin)["artifacts"]: print(artifact["name"], artifact["url"])' |
    while read -r name path; do
        case $path in http*) ;; *) path=$url$path ;; esac
        curl -sS --fail-with-body -H "X-API-Key: $API_KEY" -o "$out/$name" "$path"
        echo "written: $out/$name" >&2
    done
