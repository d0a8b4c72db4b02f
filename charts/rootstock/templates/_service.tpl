{{/* The headless Service of a component's pods of all models. Takes {root, component, port, metricsPort}. */}}
{{- define "rootstock.headless" -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ include "rootstock.componentName" . }}
  labels:
    {{- include "rootstock.labels" . | nindent 4 }}
spec:
  clusterIP: None
  publishNotReadyAddresses: false
  selector:
    {{- include "rootstock.selector" . | nindent 4 }}
  ports:
    - name: grpc
      port: {{ .port }}
      targetPort: grpc
      {{- if not (include "rootstock.tls" .root) }}
      appProtocol: kubernetes.io/h2c
      {{- end }}
    - name: metrics
      port: {{ .metricsPort }}
      targetPort: metrics
{{- end }}
