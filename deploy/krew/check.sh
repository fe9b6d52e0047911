# shellcheck shell=sh
# shellcheck disable=SC2154
# `kubectl postern check`: read by kubectl-postern, into which `cargo xtask release` puts it.

# One check's line of the report: its state, what was checked, what was found, and how to fix it.
say() {
  case $1 in
    BROKEN) worst=2 ;;
    WARNING) [ "$worst" -gt 1 ] || worst=1 ;;
  esac
  case $1$unfinished in BROKEN* | WARNING1) awaited=${awaited:-$2: $3} ;; esac
  report="$report$(printf '%-8s %-18s %s' "$1" "$2" "$3")
"
  [ -z "${4:-}" ] || report="$report           fix: $4
"
}

# Whether a version such as 6.1.0-18-amd64 is that one, such as 5.10, or newer.
newer() {
  of=${1#*.}
  [ "${1%%.*}" -gt "${2%%.*}" ] || { [ "${1%%.*}" -eq "${2%%.*}" ] && [ "${of%%[!0-9]*}" -ge "${2#*.}" ]; }
}

# Collects rights that are missing, as `kubectl auth can-i` has them.
may() {
  case $(kube auth can-i "$@" 2>/dev/null </dev/null || :) in
    yes*) ;;
    *) missing="$missing${missing:+, }$*" ;;
  esac
}

# Names of the nodes that have one of these labels.
labelled() {
  for label in "$@"; do
    kube get nodes --selector="$label" --no-headers 2>/dev/null || :
  done | awk '{ print $1 }' | sort -u
}

before() {
  if ! server=$(kube get --raw=/version 2>&1); then
    say BROKEN 'API server' "$(echo "$server" | tail -n 1)" 'name the cluster: --context, --kubeconfig'
    return
  fi
  server=$(echo "$server" | tr -d ' \n' | sed -n 's/.*"major":"\([0-9]*\)[^"]*","minor":"\([0-9]*\).*/\1.\2/p')
  if ! newer "${server:-0.0}" 1.24; then
    say BROKEN Kubernetes "${server:-unknown}" 'update the cluster to 1.30'
  elif ! newer "$server" 1.30; then
    say WARNING Kubernetes "$server" 'add the component kubelet-credentials; there can be no redirectors'
  else
    say ok Kubernetes "$server"
  fi

  missing=
  for what in daemonsets.apps services configmaps serviceaccounts roles.rbac.authorization.k8s.io \
    rolebindings.rbac.authorization.k8s.io; do
    may create "$what"
  done
  for what in clusterroles.rbac.authorization.k8s.io clusterrolebindings.rbac.authorization.k8s.io; do
    may create "$what" --all-namespaces
  done
  # Nobody can give the servers a right that he does not have.
  may approve signers.certificates.k8s.io/postern.internal/agent --all-namespaces
  if [ -z "$missing" ]; then
    say ok 'rights to install' yes
  else
    say BROKEN 'rights to install' "missing: $missing" 'use a kubeconfig of an administrator'
  fi
  missing=
  may create pods --subresource=exec
  may get pods --subresource=log
  may list nodes --all-namespaces
  if [ -z "$missing" ]; then
    say ok 'rights to operate' yes
  else
    say WARNING 'rights to operate' "missing: $missing" 'the other commands of this plugin need them'
  fi

  level=$(kube get namespace "$namespace" \
    --output='jsonpath={.metadata.name}:{.metadata.labels.pod-security\.kubernetes\.io/enforce}' 2>/dev/null) || level=
  case $level in
    '') say WARNING namespace "$namespace is not there, or not to be seen" "kubectl create namespace $namespace" ;;
    *: | *:privileged) say ok namespace "$namespace" ;;
    *) say BROKEN namespace "$namespace admits pods by the standard ${level#*:}" \
      "kubectl label --overwrite namespace $namespace pod-security.kubernetes.io/enforce=privileged" ;;
  esac

  case $missing in *nodes*) return ;; esac
  hosts=$(labelled node-role.kubernetes.io/control-plane node-role.kubernetes.io/controlplane node-role.kubernetes.io/master \
    node.kubernetes.io/microk8s-controlplane node-restriction.kubernetes.io/postern-gateway)
  [ -n "$hosts" ] ||
    say BROKEN masters 'no node has the label of one' 'a managed control plane needs gateways: see the page of this name'
  for host in $hosts; do
    kernel=$(kube get node "$host" --output='jsonpath={.status.nodeInfo.kernelVersion}')
    if ! newer "$kernel" 5.10; then
      say BROKEN "kernel of $host" "$kernel" 'update it to 5.10, better 6.1'
    elif ! newer "$kernel" 5.11; then
      say WARNING "kernel of $host" "$kernel" 'add the component kernel-5.10'
    elif ! newer "$kernel" 6.1; then
      say WARNING "kernel of $host" "$kernel: connects to a node without a tunnel are reset, not refused" 'update it to 6.1'
    else
      say ok "kernel of $host" "$kernel"
    fi
  done

  edges=$(labelled node-role.kubernetes.io/edge openyurt.io/is-edge-worker=true superedge.io/edge-node=enable | grep -c .) || :
  if [ "$edges" -gt 0 ]; then
    say ok 'edge nodes' "$edges"
  else
    say WARNING 'edge nodes' 'no node has the label of one' 'kubectl label node NAME node-role.kubernetes.io/edge='
  fi
}

rollouts() {
  format='{.metadata.name}|{.metadata.generation}|{.status.observedGeneration}|{.status.desiredNumberScheduled}'
  format="$format|{.status.updatedNumberScheduled}|{.status.numberAvailable}"
  if ! rows=$(kube get daemonsets --selector='app.kubernetes.io/name in (tunnel-server, tunnel-redirector, tunnel-agent)' \
    --output="jsonpath={range .items[*]}$format{\"\\n\"}{end}" 2>&1); then
    say BROKEN DaemonSets "$(echo "$rows" | tail -n 1)"
    return
  fi
  for name in tunnel-server tunnel-redirector tunnel-agent; do
    row=$(printf '%s\n' "$rows" | grep "^$name|") || {
      [ $name = tunnel-redirector ] || say BROKEN $name "no such DaemonSet in namespace $namespace" 'install it, or give --namespace'
      continue
    }
    IFS='|' read -r _ generation seen wanted updated available <<END
$row
END
    updated=${updated:-0}
    available=${available:-0}
    if [ "${seen:-0}" -lt "$generation" ] || [ "$updated" -lt "${wanted:-0}" ]; then
      unfinished=1
      say WARNING $name "is being updated: $updated of ${wanted:-0} nodes" "kubectl -n $namespace describe daemonset $name"
    elif [ "${wanted:-0}" -eq 0 ]; then
      # Kubernetes has perhaps not seen the labels yet.
      unfinished=1
      state=BROKEN
      [ $name = tunnel-server ] || state=WARNING
      say "$state" $name 'no node has the labels that it wants' "kubectl -n $namespace describe daemonset $name"
    elif [ "$available" -lt "$wanted" ]; then
      state=BROKEN
      [ $name != tunnel-agent ] || state=WARNING
      say "$state" $name "$available of $wanted nodes have a pod that is ready" \
        "kubectl -n $namespace get pods --selector app.kubernetes.io/name=$name --output wide"
    else
      say ok $name "$available of $wanted nodes"
    fi
  done
}

nodes_and_versions() {
  lines=$(summary "$1" 2>&1) || {
    say BROKEN nodes "$(printf '%s\n' "$lines" | head -n 1)"
    return
  }
  found=$(printf '%s\n' "$lines" | sed -n 's/^nodes: //p')
  # Names only: a server that lies could name flags.
  down=$(printf '%s\n' "$lines" | sed -n 's/^without a tunnel: //p' | tr ' ' '\n' | grep -E '^[a-z0-9][a-z0-9.-]*$' | paste -s -d ' ' -) || :
  # Of those without a tunnel the kubelet's own connection tells who is offline.
  # shellcheck disable=SC2086
  online=$([ -z "$down" ] || if rows=$(kube get nodes $down --ignore-not-found --no-headers); then
    printf '%s\n' "$rows" | awk '$2 ~ /^Ready/ { printf " %s", $1 }'
  else
    printf ' %s' "$down"
  fi)
  if [ -n "$online" ]; then
    say BROKEN nodes "$found; no tunnel, although the node is Ready:$online" \
      'kubectl postern test NODE; on the node, the log of its agent (crictl logs)'
  elif [ -n "$down" ]; then
    say WARNING nodes "$found; the others are not Ready: $down" 'nothing, if they are offline'
  else
    say ok nodes "$found"
  fi
  case $lines in
    *'
skew: '*) ;;
    *) say ok versions "$(printf '%s\n' "$lines" | sed -n 's/^tunnel-server \(.*\): .*/\1/p')" ;;
  esac
  while read -r line; do
    case $line in
      'skew: '*'not supported'*) state=BROKEN ;;
      'skew: '*) state=WARNING ;;
      *) continue ;;
    esac
    unfinished=1
    say "$state" versions "${line#skew: }"
  done <<END
$lines
END
}

after() {
  rollouts
  if ! found=$(pods tunnel-server 2>&1) || [ -z "$found" ]; then
    say BROKEN servers "${found:-no pod of tunnel-server runs in namespace $namespace}"
    return
  fi
  for pod in $found; do
    code=0
    said=$(in_server "$pod" doctor 2>&1) || code=$?
    counts=$(printf '%s\n' "$said" | grep -E '^[0-9]+ ok, ') || {
      say BROKEN "$pod" "doctor: $(printf '%s\n' "$said" | head -n 1)"
      continue
    }
    case $code in 0) state=ok ;; 1) state=WARNING ;; *) state=BROKEN ;; esac
    say "$state" "$pod" "doctor: $counts"
    details=$(printf '%s\n' "$said" | grep -E '^(WARNING|BROKEN|  )') || continue
    report="$report$(printf '%s\n' "$details" | sed 's/^/  /')
"
  done
  nodes_and_versions "$found"
}

check() {
  round=after
  patience=0
  for word in "$@"; do
    case $word in
      --pre) round=before ;;
      --wait) patience=300 ;;
      --wait=*)
        patience=${word#*=}
        case $patience in *h) unit=3600 ;; *m) unit=60 ;; *) unit=1 ;; esac
        patience=${patience%[smh]}
        case $patience in '' | *[!0-9]*) fail "$word: not a duration such as 90s, 5m or 1h" ;; esac
        patience=$((patience * unit))
        ;;
      *) fail "check: $word is not known" ;;
    esac
  done
  until=$(($(date +%s) + patience))
  while :; do
    report=
    worst=0
    unfinished=
    awaited=
    $round
    if [ "$worst" -lt 2 ] && [ -z "$unfinished" ] || [ "$(date +%s)" -ge "$until" ]; then break; fi
    echo "waiting: $awaited" >&2
    sleep 3
  done
  printf '%s' "$report"
  exit "$worst"
}

