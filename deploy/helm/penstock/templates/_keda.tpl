{{/* Scaling by KEDA. */}}

{{- define "penstock.scaledObject" -}}
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
{{ include "penstock.metadata" . }}
spec:
  scaleTargetRef:
    {{- include "penstock.scaleTarget" . | nindent 4 }}
  minReplicaCount: {{ int .values.keda.minReplicas }}
  maxReplicaCount: {{ int .values.keda.maxReplicas }}
  pollingInterval: {{ int .values.keda.pollingInterval }}
  cooldownPeriod: {{ int .values.keda.cooldownPeriod }}
  {{- with .values.keda.advanced }}
  advanced:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .values.keda.fallback }}
  fallback:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  triggers:
    {{- $triggers := concat (fromYamlArray (include "penstock.triggers" .)) .values.keda.extraTriggers }}
    {{- if not $triggers }}
    {{- fail (printf "%s.keda has no trigger: set one of its targets, or extraTriggers" .kind) }}
    {{- end }}
    {{- toYaml $triggers | nindent 4 }}
{{- end }}

{{/* What each target means. Every gateway tells the pool's waiting requests, hence max and not sum, and where there is no
Prometheus any one of them is asked: KEDA 2.18 and 2.19 cannot aggregate over the pods of a Service; streams say nothing of
them, as schedulers claim also without workers. A used KV block keeps a worker: streams run on it. The recording rules say
nearly the same, but of a whole namespace, over five minutes, and only where somebody installed them: a release is scaled by
its own series, and needs no rules. */}}
{{- define "penstock.triggers" -}}
{{- $s := .root.Values.keda.selector | default (printf "namespace=%q,app_kubernetes_io_instance=%q" .root.Release.Namespace .root.Release.Name) -}}
{{- $gateways := .root.Values.keda.gatewaySelector -}}
{{- $own := include "penstock.ownPool" .root -}}
{{- $label := ternary (printf "{pool=%q}" $own) "" (ne $own "") -}}
{{- if not $gateways -}}
{{- $gateways = ternary (printf "%s,pool=%q" $s $own) $s (ne $own "") -}}
{{- end -}}
{{- $queries := dict
  "open_streams" (dict "query" (printf "sum(penstock_open_streams{%s})" $s) "type" "AverageValue")
  "log_backlog" (dict "query" (printf "sum(max by (shard) (penstock_log_backlog{%s}))" $s) "type" "AverageValue")
  "waiting_requests" (dict "query" (printf "max(penstock_waiting_requests{%s})" $gateways) "type" "AverageValue" "metric" (printf "penstock_waiting_requests%s" $label))
  "expected_wait_seconds" (dict "query" (printf "max(penstock_expected_wait_seconds{%s})" $gateways) "type" "Value" "metric" (printf "penstock_expected_wait_seconds%s" $label))
  "kv_use" (dict "query" (printf "sum(penstock_kv_blocks{%s,state=\"used\"}) / sum(penstock_kv_blocks{%s})" $s $s) "type" "Value")
  "preemptions_per_second" (dict "query" (printf "sum(rate(penstock_preemptions_total{%s}[2m]))" $s) "type" "Value")
-}}
{{- $keda := .root.Values.keda -}}
{{- $allowed := dict
  "gateway" (list "open_streams")
  "tokenizer" (list "prompts_lag")
  "scheduler" (list)
  "detokenizer" (list "log_backlog")
  "worker" (list "waiting_requests" "expected_wait_seconds" "kv_use" "preemptions_per_second")
-}}
{{- range $target, $value := .values.keda.targets -}}
{{- if $value -}}
{{- if not (has $target (index $allowed $.kind)) -}}
{{- fail (printf "%s.keda.targets.%s: a %s has no such target, only: %s" $.kind $target $.kind (join ", " (index $allowed $.kind))) -}}
{{- end -}}
{{- $query := index $queries $target -}}
{{- if and $query.metric (not $.root.Values.gateway.enabled) (or (not $keda.gatewaySelector) (ne $keda.source "prometheus")) -}}
{{- fail (printf "%s.keda.targets.%s is told by gateways, and this release has none: say in keda.gatewaySelector which series of the others are of its pool (keda.source: prometheus), or set the target to 0" $.kind $target) -}}
{{- end -}}
{{- if eq $target "prompts_lag" }}
{{ include "penstock.lagTrigger" (dict "root" $.root "lag" $value "fullname" $.fullname) }}
{{- else if eq $keda.source "prometheus" }}
- type: prometheus
  name: {{ $target | replace "_" "-" }}
  metricType: {{ $query.type }}
  metadata:
    serverAddress: {{ $keda.prometheusAddress }}
    query: {{ $query.query | quote }}
    threshold: {{ include "penstock.text" $value | quote }}
    activationThreshold: "0"
  {{- with $keda.authenticationRef }}
  authenticationRef:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- else if $query.metric }}
- type: metrics-api
  name: {{ $target | replace "_" "-" }}
  metricType: {{ $query.type }}
  metadata:
    url: {{ ternary "https" "http" (ne $.root.Values.tls.existingSecret "") }}://{{ include "penstock.fullname" $.root }}-gateway-metrics.{{ $.root.Release.Namespace }}.svc.{{ $.root.Values.clusterDomain }}:9100/metrics
    format: prometheus
    valueLocation: {{ $query.metric | quote }}
    {{- if $.root.Values.tls.existingSecret }}
    unsafeSsl: "true"
    {{- end }}
    targetValue: {{ include "penstock.text" $value | quote }}
    activationTargetValue: "0"
  {{- with $keda.authenticationRef }}
  authenticationRef:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}
{{- end -}}
{{- end }}

{{/* The one place where a stream tells what waits: prompts that no tokenizer has read; of (root, lag). */}}
{{- define "penstock.lagTrigger" -}}
{{- $values := .root.Values -}}
{{- $where := $values.keda.redis -}}
{{- $sentinels := include "penstock.sentinelAddresses" .root -}}
{{- $isSentinel := and $values.valkey.enabled (ne $sentinels "") -}}
{{- if not $where -}}
{{- if $isSentinel -}}
{{- $hosts := list -}}
{{- $ports := list -}}
{{- range splitList " " $sentinels -}}
{{- $hosts = append $hosts (regexReplaceAll ":[0-9]+$" . "") -}}
{{- $ports = append $ports (regexFind "[0-9]+$" .) -}}
{{- end -}}
{{- $where = dict "hosts" (join "," $hosts) "ports" (join "," $ports) "sentinelMaster" "penstock" -}}
{{- else if $values.valkey.enabled -}}
{{- $where = dict "address" (include "penstock.valkeyAddresses" .root) -}}
{{- else if regexMatch "^(redis|rediss|valkey)://" $values.redis.url -}}
{{- $address := regexReplaceAll "^[a-z]+://([^@/]*@)?([^/?]+).*$" $values.redis.url "${2}" -}}
{{- if not (regexMatch ":[0-9]+$" $address) -}}{{- $address = printf "%s:6379" $address -}}{{- end -}}
{{- $where = dict "address" $address "enableTLS" (hasPrefix "rediss" $values.redis.url | toString) -}}
{{- else -}}
{{- fail "tokenizer.keda: the lag of prompts is asked of Redis, and the chart cannot tell its address: say it in keda.redis, e.g. {address: host:6379}" -}}
{{- end -}}
{{- end -}}
- type: {{ ternary "redis-sentinel-streams" "redis-streams" (hasKey $where "sentinelMaster") }}
  name: prompts-lag
  metricType: AverageValue
  metadata:
    {{- toYaml $where | nindent 4 }}
    {{- if and $values.valkey.enabled $values.valkey.tls.enabled }}
    enableTLS: "true"
    {{- end }}
    stream: {{ printf "{%s}:prompts" $values.pool | quote }}
    consumerGroup: tokenizers
    lagCount: {{ include "penstock.text" .lag | quote }}
    activationLagCount: "0"
  {{- if and $values.valkey.enabled (or $values.valkey.auth.enabled $values.valkey.tls.enabled) }}
  authenticationRef: {name: {{ include "penstock.fullname" .root }}-valkey-scaler}
  {{- else if $values.keda.redisAuthenticationRef }}
  authenticationRef:
    {{- toYaml $values.keda.redisAuthenticationRef | nindent 4 }}
  {{- end }}
{{- end }}
