{{/*
Annotations for ingress controllers: streams are long and may be silent, responses must not be buffered, bodies may have the gateway's
limits, and health checks use /ready. docs/how-to/kubernetes/load-balancers.md explains each annotation. All take the root.
*/}}

{{/* Bytes of the largest body: of a request, or of a file for a batch. */}}
{{- define "rootstock.bodyBytes" -}}
{{- $settings := .Values.gateway.settings -}}
{{ max (int64 (default 67108864 $settings.max_body_bytes)) (int64 (default 209715200 $settings.max_file_bytes)) }}
{{- end }}

{{/* Timeout in seconds. It is longer than the gateway's, so that clients get the gateway's response with the reason. */}}
{{- define "rootstock.balancerSeconds" -}}
{{ add (ceil (default 600 .Values.gateway.settings.request_timeout_s)) 30 }}
{{- end }}

{{- define "rootstock.ingress.annotations" -}}
{{- $seconds := include "rootstock.balancerSeconds" . -}}
{{- $scheme := ternary "HTTPS" "HTTP" (ne .Values.gateway.tlsSecret "") -}}
{{- if eq .Values.ingress.controller "nginx" -}}
nginx.ingress.kubernetes.io/proxy-body-size: {{ include "rootstock.bodyBytes" . | quote }}
nginx.ingress.kubernetes.io/proxy-buffering: "off"
nginx.ingress.kubernetes.io/proxy-request-buffering: "off"
nginx.ingress.kubernetes.io/proxy-read-timeout: {{ $seconds | quote }}
nginx.ingress.kubernetes.io/proxy-send-timeout: {{ $seconds | quote }}
nginx.ingress.kubernetes.io/backend-protocol: {{ $scheme }}
{{- else if eq .Values.ingress.controller "alb" -}}
alb.ingress.kubernetes.io/target-type: ip
alb.ingress.kubernetes.io/backend-protocol: {{ $scheme }}
alb.ingress.kubernetes.io/healthcheck-protocol: {{ $scheme }}
alb.ingress.kubernetes.io/healthcheck-path: /ready
alb.ingress.kubernetes.io/healthcheck-port: traffic-port
alb.ingress.kubernetes.io/healthcheck-interval-seconds: "5"
alb.ingress.kubernetes.io/healthcheck-timeout-seconds: "4"
alb.ingress.kubernetes.io/healthy-threshold-count: "2"
alb.ingress.kubernetes.io/unhealthy-threshold-count: "2"
alb.ingress.kubernetes.io/success-codes: "200"
alb.ingress.kubernetes.io/load-balancer-attributes: idle_timeout.timeout_seconds={{ min (int $seconds) 4000 }}
alb.ingress.kubernetes.io/target-group-attributes: deregistration_delay.timeout_seconds={{ min (int .Values.drainSeconds) 3600 }},load_balancing.algorithm.type=least_outstanding_requests
{{- end -}}
{{- end }}

{{/* Annotations of the gateway's Service, where Google's load balancer reads its options. */}}
{{- define "rootstock.service.annotations" -}}
{{- if and .Values.ingress.enabled (eq .Values.ingress.controller "gce") -}}
cloud.google.com/neg: '{"ingress": true}'
{{- if .Values.gateway.tlsSecret }}
cloud.google.com/app-protocols: '{"http":"HTTPS"}'
{{- end }}
cloud.google.com/backend-config: {{ dict "default" (include "rootstock.componentName" (dict "root" . "component" "gateway")) | toJson | squote }}
{{- end -}}
{{- end }}
