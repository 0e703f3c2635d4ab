{{/* Arguments of the services; each template gives a YAML list for (root, kind, values). No secret is among them. */}}

{{/* What all services are told. */}}
{{- define "penstock.arguments" -}}
{{- $values := .root.Values -}}
- --pool={{ $values.pool }}
- --num-shards={{ int $values.numShards }}
- --name={{ .processName }}
- --grpc-address={{ $values.listenHost }}:50051
- --metrics-address={{ $values.listenHost }}:9100
{{- if eq .values.probes.protocol "grpc" }}
- --grpc-health-address={{ $values.listenHost }}:8081
{{- else }}
- --health-address={{ $values.listenHost }}:8081
{{- end }}
{{- if $values.auth.controlToken.existingSecret }}
- --control-token-file=/etc/penstock/control-token/{{ $values.auth.controlToken.key }}
{{- end }}
{{- if $values.auth.metricsToken.existingSecret }}
- --metrics-token-file=/etc/penstock/metrics-token/{{ $values.auth.metricsToken.key }}
{{- end }}
{{- if $values.tls.existingSecret }}
- --tls-cert=/etc/penstock/tls/tls.crt
- --tls-key=/etc/penstock/tls/tls.key
{{- with $values.tls.clientCaKey }}
- --tls-client-ca=/etc/penstock/tls/{{ . }}
{{- end }}
{{- end }}
{{- if include "penstock.redisPasswordSecret" .root }}
- --redis-password-file=/etc/penstock/redis-password/password
{{- end }}
{{ include (printf "penstock.arguments.%s" .kind) . }}
{{- range $flag, $value := mergeOverwrite (dict "log-format" "json") (deepCopy $values.settings) .values.settings }}
{{- if kindIs "bool" $value }}
- --{{ if not $value }}no-{{ end }}{{ $flag }}
{{- else if not (kindIs "invalid" $value) }}
- {{ printf "--%s=%s" $flag (include "penstock.text" $value) | quote }}
{{- end }}
{{- end }}
{{- range .values.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{- define "penstock.arguments.gateway" -}}
- --http-address={{ .root.Values.listenHost }}:8000
{{- if .root.Values.pools }}
- --pools=/etc/penstock/pools/pools.jsonl
{{- else }}
{{- with .root.Values.model.servedNames }}
- {{ printf "--served-model-name=%s" (join "," .) | quote }}
{{- end }}
{{- end }}
{{- with .root.Values.auth.apiKeys }}
{{- if .existingSecret }}
- --api-keys-file=/etc/penstock/api-keys/{{ .key }}
{{- end }}
{{- end }}
{{- end }}

{{- define "penstock.arguments.tokenizer" -}}
{{ include "penstock.modelArguments" .root }}
{{- end }}

{{- define "penstock.arguments.scheduler" -}}
{{- end }}

{{- define "penstock.arguments.detokenizer" -}}
{{ include "penstock.modelArguments" .root }}
{{- end }}

{{/* One rank for each pod: LeaderWorkerSet says which, and where the first is. */}}
{{- define "penstock.arguments.worker" -}}
{{ include "penstock.modelArguments" .root }}
{{- if gt (int .values.tensorParallelSize) 1 }}
- --rank=$(LWS_WORKER_INDEX)
- --tensor-parallel-size=$(LWS_GROUP_SIZE)
- --distributed-address=tcp://$(LWS_LEADER_ADDRESS):{{ int .values.distributedPort }}
{{- end }}
{{- end }}
