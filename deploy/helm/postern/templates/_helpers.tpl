{{/* Labels of every object. */}}
{{- define "postern.labels" -}}
{{- include "postern.labelsOf" (list . "postern") -}}
{{- end }}

{{/* The same with a program's name: (list . "tunnel-server"). */}}
{{- define "postern.labelsOf" -}}
{{- $root := index . 0 -}}
{{- include "postern.podLabels" (index . 1) }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* Labels of pods, without those that another version of the chart changes: they would replace every pod. Selectors, which nothing
     can change, have the name alone. */}}
{{- define "postern.podLabels" -}}
app.kubernetes.io/name: {{ . }}
app.kubernetes.io/part-of: postern
{{- end }}

{{/* What gives a ServiceAccount the ClusterRole of the same name: (list . "postern:tunnel-server" "tunnel-server"). */}}
{{- define "postern.clusterRoleBinding" -}}
{{- $root := index . 0 -}}
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: {{ index . 1 }}
  labels:
    {{- include "postern.labels" $root | nindent 4 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: ClusterRole
  name: {{ index . 1 }}
subjects:
  - kind: ServiceAccount
    name: {{ index . 2 }}
    namespace: {{ $root.Release.Namespace }}
{{- end }}

{{/* An image: (list . "tunnel-server" IMAGE-OF-THE-VALUES). */}}
{{- define "postern.image" -}}
{{- $values := (index . 0).Values.image -}}
{{- $image := index . 2 -}}
{{- $image.repository | default (printf "%s/postern/%s" $values.registry (index . 1)) -}}
{{- if $image.tag -}}
{{- printf ":%s" $image.tag -}}
{{- else if not $image.digest -}}
{{- printf ":%s" ($values.tag | default (index . 0).Chart.AppVersion) -}}
{{- end -}}
{{- with $image.digest }}@{{ . }}{{ end -}}
{{- end }}

{{/* Of a DaemonSet: (list . "server"). */}}
{{- define "postern.updateStrategy" -}}
{{- $values := (index (index . 0).Values (index . 1)).updateStrategy -}}
type: {{ $values.type }}
{{- if eq $values.type "RollingUpdate" }}
{{- $rolling := $values.rollingUpdate -}}
{{- $isZero := dict "0" true "0%" true -}}
{{- if eq (hasKey $isZero (toString $rolling.maxSurge)) (hasKey $isZero (toString $rolling.maxUnavailable)) -}}
{{- fail (printf "%s.updateStrategy.rollingUpdate: one of maxSurge and maxUnavailable is 0, the other not; they are %v and %v" (index . 1) $rolling.maxSurge $rolling.maxUnavailable) -}}
{{- end }}
rollingUpdate:
  {{- toYaml $rolling | nindent 2 }}
{{- end }}
{{- end }}

{{/* Labels that distributions give to masters, as a list in JSON: kubeadm, k3s and most others; RKE1; before 1.24; MicroK8s. */}}
{{- define "postern.masters" -}}
["node-role.kubernetes.io/control-plane","node-role.kubernetes.io/controlplane","node-role.kubernetes.io/master","node.kubernetes.io/microk8s-controlplane"]
{{- end }}

{{/* Expressions that match no master. */}}
{{- define "postern.notMasters" -}}
{{- range $at, $label := include "postern.masters" . | fromJsonArray }}
{{- if $at }}
{{ end -}}
- key: {{ $label }}
  operator: DoesNotExist
{{- end }}
{{- end }}

{{/* The nodes of servers. */}}
{{- define "postern.serverNodes" -}}
{{- if .Values.server.nodeSelectorTerms -}}
{{- toYaml .Values.server.nodeSelectorTerms }}
{{- else if .Values.server.gateway -}}
{{- include "postern.gateways" . }}
{{- else -}}
{{- range $at, $label := include "postern.masters" . | fromJsonArray }}
{{- if $at }}
{{ end -}}
- matchExpressions:
    - key: {{ $label }}
      operator: Exists
{{- end }}
{{- end }}
{{- end }}

{{/* The nodes of redirectors. */}}
{{- define "postern.redirectorNodes" -}}
{{- if .Values.redirector.nodeSelectorTerms -}}
{{- toYaml .Values.redirector.nodeSelectorTerms }}
{{- else if .Values.redirector.gateway -}}
# A master has a server, beside which no redirector may run.
{{- include "postern.gateways" . | nindent 0 }}
    {{- include "postern.notMasters" . | nindent 4 }}
{{- else -}}
# Neither a master nor an edge node.
- matchExpressions:
    {{- include "postern.notMasters" . | nindent 4 }}
    {{- range include "postern.edgeNodes" . | fromJsonArray }}
    - key: {{ .key }}
      {{- if .values }}
      operator: NotIn
      values: {{ toJson .values }}
      {{- else }}
      operator: DoesNotExist
      {{- end }}
    {{- end }}
{{- end }}
{{- end }}

{{/* The nodes of gateways. */}}
{{- define "postern.gateways" -}}
- matchExpressions:
    - key: node-restriction.kubernetes.io/postern-gateway
      operator: Exists
{{- end }}

{{/* The volume of /dev/net/tun: (list . "mount") or (list . "volume"). The folder, as a host may have no such device. */}}
{{- define "postern.tun" -}}
{{- if (index . 0).Values.server.podsByRoute -}}
- name: tun
{{- if eq (index . 1) "mount" }}
  mountPath: /dev/net
  readOnly: true
{{- else }}
  hostPath:
    path: /dev/net
    type: DirectoryOrCreate
{{- end }}
{{- end }}
{{- end }}

{{/* The edge nodes' labels, given or not, as a list in JSON. */}}
{{- define "postern.edgeNodes" -}}
{{- if .Values.edgeNodes -}}
{{- toJson .Values.edgeNodes -}}
{{- else -}}
[{"key":"openyurt.io/is-edge-worker","values":["true"]},{"key":"superedge.io/edge-node","values":["enable"]},{"key":"node-role.kubernetes.io/edge"}]
{{- end -}}
{{- end }}

{{/* The same as a selector, in the form of --edge-selector. */}}
{{- define "postern.edgeSelector" -}}
{{- $terms := list -}}
{{- range include "postern.edgeNodes" . | fromJsonArray -}}
{{- if not .values -}}
{{- $terms = append $terms .key -}}
{{- else if eq (len .values) 1 -}}
{{- $terms = append $terms (printf "%s=%s" .key (first .values)) -}}
{{- else -}}
{{- $terms = append $terms (printf "%s in (%s)" .key (join "," .values)) -}}
{{- end -}}
{{- end -}}
{{- join " || " $terms -}}
{{- end }}

{{- define "postern.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- end }}

{{/* Refuses ports that a container may not bind, as its capabilities are: (list "server" SECURITY-CONTEXT "server.ports" PORTS). */}}
{{- define "postern.bindable" -}}
{{- $program := index . 0 -}}
{{- $context := index . 1 -}}
{{- $key := index . 2 -}}
{{- $added := ($context.capabilities).add -}}
{{- if not (or $context.privileged (has "NET_BIND_SERVICE" $added) (has "ALL" $added)) -}}
{{- range $name, $port := index . 3 -}}
{{- if and (gt (int $port) 0) (lt (int $port) 1024) -}}
{{- fail (printf "%s.%s: to listen at %d, which is below 1024, add NET_BIND_SERVICE to %s.securityContext.capabilities.add; or choose another port" $key $name (int $port) $program) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Contradictions that a schema cannot express. */}}
{{- define "postern.check" -}}
{{- $kubernetes := .Capabilities.KubeVersion.Version -}}
{{- if semverCompare "<1.30.0-0" $kubernetes -}}
{{- if not .Values.agent.kubeletCredentials.enabled -}}
{{- fail (printf "agent.kubeletCredentials.enabled: this is Kubernetes %s, and agents get a certificate by their ServiceAccount from 1.30 on: set it to true" $kubernetes) -}}
{{- end -}}
{{- if .Values.redirector.enabled -}}
{{- fail (printf "redirector.enabled: this is Kubernetes %s, and redirectors need 1.30: set it to false, or update the cluster" $kubernetes) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.service.externalAddresses (ne .Values.service.type "ClusterIP") -}}
{{- fail (printf "service.externalAddresses: only with service.type ClusterIP, and it is %s" .Values.service.type) -}}
{{- end -}}
{{- if and .Values.service.externalTrafficPolicy (eq .Values.service.type "ClusterIP") -}}
{{- fail "service.externalTrafficPolicy: a Service of type ClusterIP has none" -}}
{{- end -}}
{{- if and (or .Values.service.loadBalancerSourceRanges .Values.service.loadBalancerClass) (ne .Values.service.type "LoadBalancer") -}}
{{- fail (printf "service.loadBalancerSourceRanges and loadBalancerClass: only with service.type LoadBalancer, and it is %s" .Values.service.type) -}}
{{- end -}}
{{- if and .Values.server.plainClients (eq (int .Values.server.ports.plain) 0) -}}
{{- fail "server.plainClients: the plain listener is off; set server.ports.plain" -}}
{{- end -}}
{{- if and .Values.agent.allowTargets .Values.server.edgePodRoutes -}}
{{- fail "agent.allowTargets: with server.edgePodRoutes agents take the ranges of pods from their Nodes; name the ranges in allowTargets with extraArgs --edge-pod-routes instead" -}}
{{- end -}}
{{- if and .Values.redirector.enabled (or .Values.server.nodeSelectorTerms .Values.server.gateway) (not .Values.redirector.nodeSelectorTerms) -}}
{{- fail "redirector.nodeSelectorTerms: servers run where server.nodeSelectorTerms says, or on gateways with server.gateway, and no redirector may run there: name other nodes" -}}
{{- end -}}
{{- if and .Values.redirector.gateway (not .Values.redirector.enabled) -}}
{{- fail "redirector.gateway: there are no redirectors; set redirector.enabled" -}}
{{- end -}}
{{- if or .Values.server.gateway .Values.redirector.gateway -}}
{{- if not .Values.server.podsByRoute -}}
{{- fail "server.podsByRoute: a gateway takes connections by route only: leave it at true" -}}
{{- end -}}
{{- if not .Values.server.redirectClients -}}
{{- fail "server.redirectClients: a gateway would serve its own pods only: name the clients" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.redirector.metrics.enabled (not .Values.redirector.enabled) -}}
{{- fail "redirector.metrics.enabled: there are no redirectors; set redirector.enabled" -}}
{{- end -}}
{{- if and .Values.monitoring.rules (not .Values.server.metrics.enabled) -}}
{{- fail "monitoring.rules: Prometheus would get no metrics of servers, which the alerts are about: set server.metrics.enabled" -}}
{{- end -}}
{{- if .Values.monitoring.podMonitor -}}
{{- $tunnelled := false -}}
{{- range .Values.tunnelledPorts.loopback -}}
{{- if eq (int .) (int $.Values.agent.adminPort) -}}{{- $tunnelled = true -}}{{- end -}}
{{- end -}}
{{- if not $tunnelled -}}
{{- fail (printf "monitoring.podMonitor: agents answer on their loopback only: add %d to tunnelledPorts.loopback" (int .Values.agent.adminPort)) -}}
{{- end -}}
{{- end -}}
{{- end }}
