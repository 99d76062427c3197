{{- define "kvcast.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- /* 48 characters leave room for the suffix -serve-headless. */ -}}
{{- define "kvcast.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 48 | trimSuffix "-" }}
{{- else if contains (include "kvcast.name" .) .Release.Name }}
{{- .Release.Name | trunc 48 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "kvcast.name" .) | trunc 48 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- /* The labels of all pods of servers. */ -}}
{{- define "kvcast.selectorLabels" -}}
app.kubernetes.io/name: {{ include "kvcast.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- /* Those of one kind: server, which reads engines, or serve-only. */ -}}
{{- define "kvcast.componentLabels" -}}
{{ include "kvcast.selectorLabels" .root }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "kvcast.labels" -}}
{{ include "kvcast.selectorLabels" . }}
app.kubernetes.io/version: {{ default .Chart.AppVersion .Values.image.tag | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "kvcast.image" -}}
{{- if .Values.image.digest }}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest }}
{{- else }}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) }}
{{- end }}
{{- end }}

{{- define "kvcast.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "kvcast.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- /* Whether there are servers that serve routers only: "true" or "". */ -}}
{{- define "kvcast.hasServeOnly" -}}
{{- if or .Values.serveOnly.autoscaling.enabled (gt (int .Values.serveOnly.replicas) 0) }}true{{ end }}
{{- end }}

{{- /* Whether kvcast needs the Kubernetes API: "true" or "". */ -}}
{{- define "kvcast.discoversPods" -}}
{{- range .Values.discovery }}{{ if or .kubernetes .inference_pool }}true{{ end }}{{ end }}
{{- end }}

{{- /* The Service that routers connect to. */ -}}
{{- define "kvcast.routersService" -}}
{{ include "kvcast.fullname" . }}{{ if include "kvcast.hasServeOnly" . }}-serve{{ end }}
{{- end }}

{{- /* The configuration file: the values of config, and over them what the chart decides. */ -}}
{{- define "kvcast.config" -}}
{{- $config := deepCopy (default dict .Values.config) }}
{{- $_ := set $config "listen" ":50051" }}
{{- $_ := set $config "admin" ":9464" }}
{{- $journal := dict }}
{{- with .Values.journal }}
{{- if eq .store "file" }}
{{- $journal = dict "store" "file:/var/lib/kvcast/journal" }}
{{- else if eq .store "nats" }}
{{- $journal = dict "store" (join "," .nats.servers) "stream" .nats.stream "replicas" .nats.replicas }}
{{- if .nats.credentialsSecret }}
{{- $_ := set $journal "credentials" "/etc/kvcast/nats/nats.creds" }}
{{- end }}
{{- if .nats.tlsSecret }}
{{- $_ := set $journal "tls_ca" "/etc/kvcast/nats-tls/ca.crt" }}
{{- if .nats.clientCertificate }}
{{- $_ := set $journal "tls_cert" "/etc/kvcast/nats-tls/tls.crt" }}
{{- $_ := set $journal "tls_key" "/etc/kvcast/nats-tls/tls.key" }}
{{- end }}
{{- end }}
{{- else }}
{{- $journal = dict "store" "memory" }}
{{- end }}
{{- end }}
{{- $_ := set $config "journal" (mustMergeOverwrite (deepCopy (default dict $config.journal)) $journal) }}
{{- $auth := dict "open_registration" .Values.auth.openRegistration }}
{{- if .Values.auth.tokensSecret }}
{{- $_ := set $auth "tokens" "/etc/kvcast/auth/tokens" }}
{{- end }}
{{- if .Values.auth.certificates }}
{{- $_ := set $auth "certificates" "/etc/kvcast/config/certificates" }}
{{- end }}
{{- $_ := set $config "auth" $auth }}
{{- if .Values.tls.secret }}
{{- $tls := dict "cert" "/etc/kvcast/tls/tls.crt" "key" "/etc/kvcast/tls/tls.key" }}
{{- if .Values.tls.clientCertificates }}
{{- $_ := set $tls "client_ca" "/etc/kvcast/tls/ca.crt" }}
{{- end }}
{{- $_ := set $config "tls" $tls }}
{{- end }}
{{- $listeners := list }}
{{- range .Values.listeners }}
{{- $listeners = append $listeners (merge (dict "bind" (printf "tcp://*:%v" .port)) (omit . "name" "port")) }}
{{- end }}
{{- $_ := set $config "listeners" $listeners }}
{{- $_ := set $config "discovery" (default list .Values.discovery) }}
{{- $_ := set $config "workers" (default list .Values.workers) }}
{{- toYaml $config }}
{{- end }}

{{- /* The configuration of servers that serve routers only: the same, without engines. */ -}}
{{- define "kvcast.serveOnlyConfig" -}}
{{- $config := include "kvcast.config" . | fromYaml }}
{{- $_ := set $config "listeners" list }}
{{- $_ := set $config "discovery" list }}
{{- $_ := set $config "workers" list }}
{{- $cluster := default dict $config.cluster }}
{{- $_ := set $cluster "ingest" false }}
{{- $_ := set $cluster "serve" true }}
{{- $_ := set $config "cluster" $cluster }}
{{- toYaml $config }}
{{- end }}

{{- /* The admin port has TLS if the configuration says so. */}}
{{- define "kvcast.adminScheme" -}}
{{ ternary "HTTPS" "HTTP" (default false (default dict .Values.config).admin_tls) }}
{{- end }}
