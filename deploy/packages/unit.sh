# shellcheck shell=sh
# shellcheck disable=SC2154
# Part of prerm and postrm, into which `cargo xtask release` puts it.

# A unit in /etc hides the package's. The host's own is one that starts another program; a copy of the package's is not.
is_hosts_own() {
    unit=/etc/systemd/system/postern-$name@.service
    program=
    # Lines may be continued, as systemd reads them.
    # shellcheck disable=SC2162
    test ! -r "$unit" || while IFS='= 	' read key word _ || test -n "$key"; do
        test "$key" != ExecStart || program=$word
    done <"$unit"
    while :; do
        case $program in
        [-@:+!\|\"\']*) program=${program#?} ;;
        *) break ;;
        esac
    done
    program=${program%[\"\']}
    case $program in
    '') return 1 ;;
    */*) ;;
    *)
        # In the order in which systemd looks for a name.
        for folder in /usr/local/sbin /usr/local/bin /usr/sbin /usr/bin; do
            test ! -e "$folder/$program" || break
        done
        test -e "$folder/$program" || return 1
        program=$folder/$program
        ;;
    esac
    test "$program" != "/usr/bin/tunnel-$name" && test "$(readlink -f "$program")" != "/usr/bin/tunnel-$name"
}
