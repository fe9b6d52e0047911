#!/bin/sh
# What konnectivity's tests start as an agent: tunnel-agent, with their flags. They give every flag, and empty ones for what is not
# wanted; their targets are on the loopback, and one is a black hole.
for flag; do
    shift
    case $flag in
    *= | *='[]') ;;
    *) set -- "$@" "$flag" ;;
    esac
done
exec "${POSTERN_AGENT:?}" --node-name=tests \
    '--allow-target=127.0.0.0/8:*' '--allow-target=[::1/128]:*' '--allow-target=198.18.0.254/32:*' "$@"
