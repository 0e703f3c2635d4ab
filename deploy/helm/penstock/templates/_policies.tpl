{{/* Network policies: the arrows of docs/architecture.md. Everybody needs Redis, gateways need tokenizers, and nobody needs
anybody else, but for ranks of one worker. A kubelet needs no rule: what comes from a pod's own node is always let through. */}}

{{/* Anybody: for rules whose peers are open. */}}
{{- define "penstock.anywhere" -}}
- ipBlock: {cidr: 0.0.0.0/0}
- ipBlock: {cidr: "::/0"}
{{- end }}

{{/* Egress to Redis; of the root. */}}
{{- define "penstock.redisEgress" -}}
{{- if .Values.valkey.enabled -}}
- to:
    - podSelector:
        matchLabels:
          {{- include "penstock.selector" (dict "root" . "kind" "valkey") | nindent 10 }}
  ports: [{port: 6379}]
{{- if include "penstock.sentinelAddresses" . }}
- to:
    - podSelector:
        matchLabels:
          {{- include "penstock.selector" (dict "root" . "kind" "sentinel") | nindent 10 }}
  ports: [{port: 26379}]
{{- end }}
{{- else -}}
- to:
    {{- if .Values.networkPolicy.redis }}
    {{- toYaml .Values.networkPolicy.redis | nindent 4 }}
    {{- else }}
    {{- include "penstock.anywhere" . | nindent 4 }}
    {{- end }}
  ports:
    {{- range .Values.redis.ports }}
    - port: {{ int . }}
    {{- end }}
{{- end }}
{{- end }}

{{- define "penstock.componentPolicy" -}}
{{- $policy := .root.Values.networkPolicy -}}
{{- $usesHub := and .root.Values.model.hub.id (has .kind (list "tokenizer" "detokenizer" "worker")) -}}
{{- $readByKeda := and (eq .kind "gateway") (eq .root.Values.keda.source "metrics-api") -}}
{{- if $policy.enabled -}}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
{{ include "penstock.metadata" . }}
spec:
  podSelector:
    matchLabels:
      {{- include "penstock.selector" . | nindent 6 }}
  policyTypes: [Ingress, Egress]
  ingress:
    - from:
        {{- toYaml $policy.prometheus | nindent 8 }}
        {{- if $readByKeda }}
        {{- toYaml $policy.keda | nindent 8 }}
        {{- end }}
      ports: [{port: metrics}]
    {{- if eq .kind "gateway" }}
    - ports: [{port: http}, {port: grpc}]
      {{- with $policy.clients }}
      from:
        {{- toYaml . | nindent 8 }}
      {{- end }}
    {{- else if or $policy.control (eq .kind "tokenizer") }}
    - ports: [{port: grpc}]
      from:
        {{- if eq .kind "tokenizer" }}
        - podSelector:
            matchLabels:
              {{- include "penstock.selector" (dict "root" .root "kind" "gateway") | nindent 14 }}
        {{- with $policy.gateways }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
        {{- end }}
        {{- with $policy.control }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    {{- end }}
    {{- if .isGroup }}
    - from: &ranks
        - podSelector:
            matchLabels:
              {{- include "penstock.selector" . | nindent 14 }}
    {{- end }}
    {{- with .values.networkPolicy.extraIngress }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  egress:
    {{- include "penstock.redisEgress" .root | nindent 4 }}
    {{- if eq .kind "gateway" }}
    {{- include "penstock.poolsEgress" .root | nindent 4 }}
    - to:
        - podSelector:
            matchLabels:
              {{- include "penstock.selector" (dict "root" .root "kind" "tokenizer") | nindent 14 }}
      ports: [{port: grpc}]
    {{- end }}
    {{- if .isGroup }}
    - to: *ranks
    {{- end }}
    {{- if $usesHub }}
    - to:
        {{- if $policy.hub }}
        {{- toYaml $policy.hub | nindent 8 }}
        {{- else }}
        {{- include "penstock.anywhere" . | nindent 8 }}
        {{- end }}
      ports: [{port: 443}]
    {{- end }}
    {{- with get (.values.settings | default dict) "otlp-traces-endpoint" }}
    - to:
        {{- if $policy.traces }}
        {{- toYaml $policy.traces | nindent 8 }}
        {{- else }}
        {{- include "penstock.anywhere" . | nindent 8 }}
        {{- end }}
      ports: [{port: {{ regexFind "[0-9]+/?$" . | trimSuffix "/" | default "4317" }}}]
    {{- end }}
    {{- with .values.networkPolicy.extraEgress }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
{{- end }}
