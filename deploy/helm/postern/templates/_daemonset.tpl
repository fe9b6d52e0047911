{{/* The DaemonSet of a program that redirects, server or redirector. What the two have at different places of the values is given:
     (dict "root" . "program" "server" "image" IMAGE "securityContext" CONTEXT "adminPort" PORT "metrics" (dict "enabled" BOOL "port" PORT)). */}}
{{- define "postern.daemonSet" -}}
{{- $root := .root -}}
{{- $values := index $root.Values .program -}}
{{- $name := printf "tunnel-%s" .program -}}
apiVersion: apps/v1
kind: DaemonSet
metadata:
  name: {{ $name }}
  namespace: {{ $root.Release.Namespace }}
  labels:
    {{- include "postern.labelsOf" (list $root $name) | nindent 4 }}
spec:
  selector:
    matchLabels:
      app.kubernetes.io/name: {{ $name }}
  minReadySeconds: 5
  # A new pod takes over from the old one of its host, sockets included. The pods declare no ports: the scheduler would not let two of
  # them on one host.
  updateStrategy:
    {{- include "postern.updateStrategy" (list $root .program) | nindent 4 }}
  template:
    metadata:
      {{- with $values.podAnnotations }}
      annotations:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      labels:
        {{- with $values.podLabels }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
        {{- if .metrics.enabled }}
        postern.internal/metrics-port: {{ .metrics.port | quote }}
        {{- end }}
        {{- include "postern.podLabels" $name | nindent 8 }}
    spec:
      serviceAccountName: {{ $name }}
      {{- include "postern.pullSecrets" $root | nindent 6 }}
      {{- with $values.priorityClassName }}
      priorityClassName: {{ . }}
      {{- end }}
      hostNetwork: true
      dnsPolicy: Default
      # Twice --drain-timeout (the first for a successor that is half-way), plus 6 s to end connections and links, and time to detach the programs.
      terminationGracePeriodSeconds: {{ include "postern.grace" (list $values.drainTimeout 2) }}
      # The pods tolerate every taint, also those of Windows nodes.
      nodeSelector:
        kubernetes.io/os: linux
      affinity:
        nodeAffinity:
          requiredDuringSchedulingIgnoredDuringExecution:
            nodeSelectorTerms:
              {{- include (printf "postern.%sNodes" .program) $root | nindent 14 }}
      {{- with $values.tolerations }}
      tolerations:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      containers:
        - name: {{ $name }}
          image: {{ include "postern.image" (list $root "tunnel-server" .image) }}
          imagePullPolicy: {{ $root.Values.image.pullPolicy }}
          args:
            {{- include (printf "postern.%sArgs" .program) $root | nindent 12 }}
          env:
            {{- include "postern.further" (list $root .program "Env" "extraEnv" "name") | nindent 12 }}
          livenessProbe:
            httpGet:
              host: 127.0.0.1
              port: {{ .adminPort }}
              path: /healthz
            periodSeconds: 10
            timeoutSeconds: 5
            failureThreshold: 3
          readinessProbe:
            httpGet:
              host: 127.0.0.1
              port: {{ .adminPort }}
              path: /readyz
            periodSeconds: 5
            timeoutSeconds: 5
            failureThreshold: 2
          {{- with $values.resources }}
          resources:
            {{- toYaml . | nindent 12 }}
          {{- end }}
          securityContext:
            {{- toYaml .securityContext | nindent 12 }}
          volumeMounts:
            {{- include "postern.further" (list $root .program "Mounts" "extraVolumeMounts" "mountPath") | nindent 12 }}
      volumes:
        {{- include "postern.further" (list $root .program "Volumes" "extraVolumes" "name") | nindent 8 }}
{{- end }}
