{{/* Returns "true" if clients need an API key. Takes the root. */}}
{{- define "rootstock.hasKeys" -}}
{{- if or .Values.auth.apiKeysSecret .Values.auth.apiKeys }}true{{ end }}
{{- end }}

{{/* Name of the Secret with the accepted API keys. Takes the root. */}}
{{- define "rootstock.keysSecret" -}}
{{- default (printf "%s-gateway-keys" (include "rootstock.fullname" .)) .Values.auth.apiKeysSecret -}}
{{- end }}

{{/* Volume with the API keys. It is mounted as a folder without subPath, so that a changed Secret reaches the gateway without a
restart. Takes the root. */}}
{{- define "rootstock.keysVolume" -}}
{{- if include "rootstock.hasKeys" . }}
- name: keys
  projected:
    sources:
      - secret:
          name: {{ include "rootstock.keysSecret" . }}
      {{- with .Values.tests.keySecret }}
      - secret:
          name: {{ . }}
          optional: true
          items:
            - {key: helm-test.json, path: helm-test.json}
      {{- end }}
{{- end }}
{{- end }}

{{- define "rootstock.keysMount" -}}
{{- if include "rootstock.hasKeys" . }}
- name: keys
  mountPath: /etc/rootstock/keys
  readOnly: true
{{- end }}
{{- end }}
