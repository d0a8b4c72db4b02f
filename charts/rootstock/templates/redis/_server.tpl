{{/* Common parts of the chart's Redis servers: Valkey for the index, Redis for the store. All take a scope. */}}

{{/* Command that starts the server as the container's first process. The password comes by standard input, because other processes can
read arguments. */}}
{{- define "rootstock.redis.command" -}}
command:
  - /bin/sh
  - -c
  - |
    {{- if include "rootstock.tls" .root }}
    : > /tmp/tls-taken
    {{- end }}
    server=valkey-server
    command -v $server > /dev/null || server=redis-server
    exec $server - "$@" <<END
    requirepass $REDISCLI_AUTH
    END
  - redis-server
{{- end }}

{{- define "rootstock.redis.listens" -}}
{{- if include "rootstock.tls" .root -}}
- --port
- "0"
- --tls-port
- "6379"
- --tls-cert-file
- /etc/rootstock/mtls/tls.crt
- --tls-key-file
- /etc/rootstock/mtls/tls.key
- --tls-ca-cert-file
- /etc/rootstock/mtls/ca.crt
- --unixsocket
- /tmp/redis.sock
- --unixsocketperm
- "700"
{{- else -}}
- --port
- "6379"
{{- end }}
- --bind
{{- if eq .root.Values.ipFamily "IPv6" }}
- "*"
- "-::*"
{{- else }}
- 0.0.0.0
{{- end }}
{{- end }}

{{/* A server's memory limit in bytes. Takes Redis's notation, such as 512mb. */}}
{{- define "rootstock.redis.bytes" -}}
{{ include "rootstock.bytes" (. | replace "kb" "Ki" | replace "mb" "Mi" | replace "gb" "Gi") }}
{{- end }}

{{/* A probe that sends PING. A server whose disk is full returns MISCONF, but still serves reads. With TLS, it uses the pod's Unix socket, which needs no certificate, and it also makes the server load newer
certificates. If the server refuses them, it continues with the old ones, and the next probe retries. */}}
{{- define "rootstock.redis.ping" -}}
- sh
- -c
- |
  cli=valkey-cli
  command -v $cli > /dev/null || cli=redis-cli
  {{- if include "rootstock.tls" .root }}
  at=/etc/rootstock/mtls
  set -- $cli -s /tmp/redis.sock
  "$@" ping | grep -q -e PONG -e MISCONF || exit 1
  [ $at/tls.crt -nt /tmp/tls-taken ] || [ $at/ca.crt -nt /tmp/tls-taken ] || exit 0
  : > /tmp/tls-taking
  "$@" config set tls-cert-file $at/tls.crt tls-key-file $at/tls.key tls-ca-cert-file $at/ca.crt | grep -q OK || exit 0
  mv /tmp/tls-taking /tmp/tls-taken
  {{- else }}
  $cli ping | grep -q -e PONG -e MISCONF
  {{- end }}
{{- end }}
