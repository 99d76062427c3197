{{- /* The template of a pod of servers: root, the component server or serve-only, and its resources. */ -}}
{{- define "kvcast.pod" -}}
{{- $component := .component }}
{{- $resources := .resources }}
{{- with .root }}
{{- $readsEngines := eq $component "server" }}
{{- $isStateful := eq .Values.journal.store "file" }}
metadata:
  labels:
    {{- include "kvcast.componentLabels" (dict "root" . "component" $component) | nindent 4 }}
    {{- with .Values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    checksum/config: {{ include (ternary "kvcast.config" "kvcast.serveOnlyConfig" $readsEngines) . | sha256sum }}
    {{- with .Values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "kvcast.serviceAccountName" . }}
  automountServiceAccountToken: {{ and $readsEngines (eq (include "kvcast.discoversPods" . | trunc 4) "true") }}
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ .Values.terminationGracePeriodSeconds }}
  {{- with .Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with .Values.podSecurityContext }}
  securityContext:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: kvcast
      image: {{ include "kvcast.image" . }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      args:
        - serve
        - --config
        - /etc/kvcast/config/{{ ternary "kvcast.yaml" "serve-only.yaml" $readsEngines }}
        {{- with .Values.extraArgs }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with .Values.extraEnv }}
      env:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      ports:
        - {name: grpc, containerPort: 50051}
        - {name: admin, containerPort: 9464}
        {{- if $readsEngines }}
        {{- range .Values.listeners }}
        - {name: {{ .name }}, containerPort: {{ .port }}}
        {{- end }}
        {{- end }}
        {{- range .Values.routerPorts }}
        - {name: {{ .name }}, containerPort: {{ .port }}}
        {{- end }}
      startupProbe: # the admin port opens when the journal has been read
        httpGet: {path: /healthz, port: admin, scheme: {{ include "kvcast.adminScheme" . }}}
        periodSeconds: 2
        failureThreshold: 300
      livenessProbe:
        httpGet: {path: /healthz, port: admin, scheme: {{ include "kvcast.adminScheme" . }}}
      readinessProbe:
        httpGet: {path: /readyz, port: admin, scheme: {{ include "kvcast.adminScheme" . }}}
        periodSeconds: 2
      {{- with .Values.lifecycle }}
      lifecycle:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      resources:
        {{- toYaml $resources | nindent 8 }}
      {{- with .Values.securityContext }}
      securityContext:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      volumeMounts:
        - {name: config, mountPath: /etc/kvcast/config, readOnly: true}
        {{- if .Values.auth.tokensSecret }}
        - {name: auth, mountPath: /etc/kvcast/auth, readOnly: true}
        {{- end }}
        {{- if .Values.tls.secret }}
        - {name: tls, mountPath: /etc/kvcast/tls, readOnly: true}
        {{- end }}
        {{- if eq .Values.journal.store "nats" }}
        {{- if .Values.journal.nats.credentialsSecret }}
        - {name: nats, mountPath: /etc/kvcast/nats, readOnly: true}
        {{- end }}
        {{- if .Values.journal.nats.tlsSecret }}
        - {name: nats-tls, mountPath: /etc/kvcast/nats-tls, readOnly: true}
        {{- end }}
        {{- end }}
        {{- if $isStateful }}
        - {name: journal, mountPath: /var/lib/kvcast}
        {{- end }}
        {{- with .Values.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: config
      configMap: {name: {{ include "kvcast.fullname" . }}}
    {{- with .Values.auth.tokensSecret }}
    - name: auth
      secret: {secretName: {{ . }}, defaultMode: 0440}
    {{- end }}
    {{- with .Values.tls.secret }}
    - name: tls
      secret: {secretName: {{ . }}, defaultMode: 0440}
    {{- end }}
    {{- if eq .Values.journal.store "nats" }}
    {{- with .Values.journal.nats.credentialsSecret }}
    - name: nats
      secret: {secretName: {{ . }}, defaultMode: 0440}
    {{- end }}
    {{- with .Values.journal.nats.tlsSecret }}
    - name: nats-tls
      secret: {secretName: {{ . }}, defaultMode: 0440}
    {{- end }}
    {{- end }}
    {{- with .Values.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with .Values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- $spreads := and .Values.spread (or (not $readsEngines) (gt (int .Values.replicas) 1)) }}
  {{- $selector := include "kvcast.componentLabels" (dict "root" . "component" $component) | fromYaml | toJson }}
  {{- if .Values.affinity }}
  affinity:
    {{- toYaml .Values.affinity | nindent 4 }}
  {{- else if $spreads }}
  affinity:
    podAntiAffinity:
      preferredDuringSchedulingIgnoredDuringExecution:
        - weight: 100
          podAffinityTerm:
            topologyKey: kubernetes.io/hostname
            labelSelector: {matchLabels: {{ $selector }}}
  {{- end }}
  {{- if .Values.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- toYaml .Values.topologySpreadConstraints | nindent 4 }}
  {{- else if $spreads }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: topology.kubernetes.io/zone
      whenUnsatisfiable: ScheduleAnyway
      labelSelector: {matchLabels: {{ $selector }}}
  {{- end }}
{{- end }}
{{- end }}
