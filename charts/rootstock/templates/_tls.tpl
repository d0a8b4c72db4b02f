{{/* TLS between services. Unless noted, helpers take a scope. */}}

{{/* Returns "true" if TLS is on. Takes the root. */}}
{{- define "rootstock.tls" -}}
{{- if or .Values.tls.secret .Values.tls.certManager.enabled }}true{{ end -}}
{{- end }}

{{/* Name of the Secret with a component's certificate: the component's own, or one for all. */}}
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

{{/* Port for probes without TLS, because kubelets have no certificate for the service's own port. The gateway always has such a port. */}}
{{- define "rootstock.tls.healthPort" -}}
{{- if include "rootstock.tls" .root -}}
{{- dict "tokenizer" "7011" "detokenizer" "7012" "worker" "7013" | dig .component "" -}}
{{- end -}}
{{- end }}

{{/* Port that probes use. Takes a scope with `port`, the port without TLS. */}}
{{- define "rootstock.tls.probed" -}}
{{- default .port (include "rootstock.tls.healthPort" .) -}}
{{- end }}

{{- define "rootstock.tls.ports" -}}
{{- with include "rootstock.tls.healthPort" . }}
- name: health
  containerPort: {{ . }}
{{- end }}
{{- end }}

{{/* Volume with the certificate. It is mounted as a folder without subPath, so that a renewed certificate reaches the process without a
restart. */}}
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

{{/* JSON list of {name, secret}: certificates for external Redis servers that the scope's pods call. */}}
{{- define "rootstock.tls.external" -}}
{{- $found := list -}}
{{- $called := dict "gateway" (list "redis" "state") "worker" (list "redis") | dig .component (list) -}}
{{- range $name := $called -}}
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

{{/* URL of one of the chart's Redis servers. Takes {root, component, password}. password: name of the variable with the password. */}}
{{- define "rootstock.tls.redisUrl" -}}
{{- $tls := include "rootstock.tls" .root -}}
redis{{ with $tls }}s{{ end }}://:$({{ .password }})@{{ include "rootstock.host" . }}:6379/0
{{- with $tls -}}
?ssl_ca_certs=/etc/rootstock/mtls/ca.crt&ssl_certfile=/etc/rootstock/mtls/tls.crt&ssl_keyfile=/etc/rootstock/mtls/tls.key
{{- end -}}
{{- end }}

{{/* Seconds of a duration like 2160h or 1h30m. */}}
{{- define "rootstock.seconds" -}}
{{- $sum := 0 -}}
{{- range regexFindAll "[0-9]+[hms]" . -1 -}}
{{- $unit := regexFind "[hms]" . -}}
{{- $sum = add $sum (mul (trimSuffix $unit . | int64) (index (dict "h" 3600 "m" 60 "s" 1) $unit)) -}}
{{- end -}}
{{ $sum }}
{{- end }}
