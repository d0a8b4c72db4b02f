#!/bin/sh
# Lists the models, sends a chat, and streams the same chat, with curl.
set -eu
url=${ROOTSTOCK_URL:-http://127.0.0.1:8000}
key=${ROOTSTOCK_API_KEY:-none}
model=${MODEL:-demo}

ask() {
  curl --silent --show-error --fail --no-buffer "$url/v1/chat/completions" \
    -H "authorization: Bearer $key" -H "content-type: application/json" -d "$1"
  echo
}

curl --silent --show-error --fail "$url/v1/models" -H "authorization: Bearer $key"
echo
ask '{"model": "'"$model"'", "temperature": 0, "messages": [{"role": "user", "content": "What is 17 + 25?"}]}'
ask '{"model": "'"$model"'", "temperature": 0, "messages": [{"role": "user", "content": "What is 17 + 25?"}], "stream": true}'
