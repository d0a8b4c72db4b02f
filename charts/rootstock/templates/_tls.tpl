{{/* TLS between services. A scope is what most take. */}}

{{/* "true" where it is on. Takes the root. */}}
{{- define "rootstock.tls" -}}
{{- if or .Values.tls.secret .Values.tls.certManager.enabled }}true{{ end -}}
{{- end }}

{{/* The Secret with a component's certificate: one for all, or its own. */}}
{{- define "rootstock.tls.secret" -}}
{{- $own := printf "%s-%s-tls" (include "rootstock.fullname" .root) .component -}}
{{- default $own .root.Values.tls.secret | replace "%s" .component -}}
{{- end }}

{{- define "rootstock.config.tls" -}}
{{- if include "rootstock.tls" .root }}
ROOTSTOCK_MTLS_CERT_FILE: /etc/rootstock/mtls/tls.crt
ROOTSTOCK_MTLS_KEY_FILE: /etc/rootstock/mtls/tls.key
ROOTSTOCK_MTLS_CA_FILE: /etc/rootstock/mtls/ca.crt
{{- if .root.Values.tls.tokenSecret }}
ROOTSTOCK_MTLS_TOKEN_FILE: /etc/rootstock/mtls/token
{{- end }}
{{- with include "rootstock.tls.healthPort" . }}
ROOTSTOCK_HEALTH_PORT: {{ . | quote }}
{{- end }}
{{- end }}
{{- end }}

{{/* Where probes ask in the clear, of services whose own port they could not; the gateway has such a port in any case. */}}
{{- define "rootstock.tls.healthPort" -}}
{{- if include "rootstock.tls" .root -}}
{{- dict "tokenizer" "7011" "detokenizer" "7012" "worker" "7013" | dig .component "" -}}
{{- end -}}
{{- end }}

{{/* Takes a scope, and the port that probes ask otherwise. */}}
{{- define "rootstock.tls.probed" -}}
{{- default .port (include "rootstock.tls.healthPort" .) -}}
{{- end }}

{{- define "rootstock.tls.ports" -}}
{{- with include "rootstock.tls.healthPort" . }}
- name: health
  containerPort: {{ . }}
{{- end }}
{{- end }}

{{/* Whole folders, not subPath: so that what changes reaches the process without a restart. */}}
{{- define "rootstock.tls.volume" -}}
{{- if include "rootstock.tls" .root }}
- name: mtls
  projected:
    sources:
      - secret:
          name: {{ include "rootstock.tls.secret" . }}
          {{- if .optional }}
          optional: true
          {{- end }}
          {{- with .root.Values.tls.caConfigMap }}
          items:
            - {key: tls.crt, path: tls.crt}
            - {key: tls.key, path: tls.key}
      - configMap:
          name: {{ . }}
          {{- if $.optional }}
          optional: true
          {{- end }}
          items:
            - {key: ca.crt, path: ca.crt}
          {{- end }}
      {{- if and .root.Values.tls.tokenSecret (not (has .component (list "redis" "state"))) }}
      - secret:
          name: {{ .root.Values.tls.tokenSecret }}
          {{- if .optional }}
          optional: true
          {{- end }}
          items:
            - {key: token, path: token}
      {{- end }}
{{- end }}
{{- include "rootstock.tls.redisVolume" . }}
{{- end }}

{{- define "rootstock.tls.mount" -}}
{{- if include "rootstock.tls" .root }}
- name: mtls
  mountPath: /etc/rootstock/mtls
  readOnly: true
{{- end }}
{{- range include "rootstock.tls.external" . | fromJsonArray }}
- name: {{ .name }}-tls
  mountPath: /etc/rootstock/{{ .name }}-tls
  readOnly: true
{{- end }}
{{- end }}

{{/* JSON list of {name, secret}: certificates for a Redis that is somebody else's, in pods that call it. */}}
{{- define "rootstock.tls.external" -}}
{{- $found := list -}}
{{- $asked := dict "gateway" (list "redis" "state") "worker" (list "redis") | dig .component (list) -}}
{{- range $name := $asked -}}
{{- with (index $.root.Values $name).externalTlsSecret -}}
{{- $found = append $found (dict "name" $name "secret" .) -}}
{{- end -}}
{{- end -}}
{{- toJson $found -}}
{{- end }}

{{- define "rootstock.tls.redisVolume" -}}
{{- range include "rootstock.tls.external" . | fromJsonArray }}
- name: {{ .name }}-tls
  secret:
    secretName: {{ .secret }}
    {{- if $.optional }}
    optional: true
    {{- end }}
{{- end }}
{{- end }}

{{/* The URL of a Redis of the chart's own. Takes {root, component, password}: the variable that holds it. */}}
{{- define "rootstock.tls.redisUrl" -}}
{{- $tls := include "rootstock.tls" .root -}}
redis{{ with $tls }}s{{ end }}://:$({{ .password }})@{{ include "rootstock.host" . }}:6379/0
{{- with $tls -}}
?ssl_ca_certs=/etc/rootstock/mtls/ca.crt&ssl_certfile=/etc/rootstock/mtls/tls.crt&ssl_keyfile=/etc/rootstock/mtls/tls.key
{{- end -}}
{{- end }}

{{/* A span like 2160h or 1h30m in seconds. */}}
{{- define "rootstock.seconds" -}}
{{- $sum := 0 -}}
{{- range regexFindAll "[0-9]+[hms]" . -1 -}}
{{- $unit := regexFind "[hms]" . -}}
{{- $sum = add $sum (mul (trimSuffix $unit . | int64) (index (dict "h" 3600 "m" 60 "s" 1) $unit)) -}}
{{- end -}}
{{ $sum }}
{{- end }}
