{{/* What both of the chart's Redis servers have: Valkey for the index, a Redis for what is kept. All take a scope. */}}

{{/* The password is in no argument, which others can read, and the server is the container's first process. */}}
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

{{/* What a server may hold, in bytes. Takes it as Redis does: 512mb. */}}
{{- define "rootstock.redis.bytes" -}}
{{ include "rootstock.bytes" (. | replace "kb" "Ki" | replace "mb" "Mi" | replace "gb" "Gi") }}
{{- end }}

{{/* An answer to PING. With TLS by a socket of the pod, which no certificate keeps out; on the way it has the server take
certificates that are newer than those that it has. Where it refuses them it goes on with the old ones, and is asked again. */}}
{{- define "rootstock.redis.ping" -}}
- sh
- -c
- |
  cli=valkey-cli
  command -v $cli > /dev/null || cli=redis-cli
  {{- if include "rootstock.tls" .root }}
  at=/etc/rootstock/mtls
  set -- $cli -s /tmp/redis.sock
  "$@" ping | grep -q PONG || exit 1
  [ $at/tls.crt -nt /tmp/tls-taken ] || [ $at/ca.crt -nt /tmp/tls-taken ] || exit 0
  : > /tmp/tls-taking
  "$@" config set tls-cert-file $at/tls.crt tls-key-file $at/tls.key tls-ca-cert-file $at/ca.crt | grep -q OK || exit 0
  mv /tmp/tls-taking /tmp/tls-taken
  {{- else }}
  $cli ping | grep -q PONG
  {{- end }}
{{- end }}
