//! `cargo xtask test --kernel NAME`: the kernel tests of the redirect, the demo and the systemd units on another kernel, in
//! virtual machines.
//!
//! A machine has no disk and no network: everything is in its initramfs. Results of tests are counted from its output; the
//! exit code of each case goes to a second serial port, so that a kernel that crashes is no success.
use std::fs;

use anyhow::{Result, bail, ensure};

use crate::chosen::Names;
use crate::command::{built, name_of};
use crate::demo::PROGRAMS;
use crate::files;
use crate::packages;
use crate::tally::{Counted, Tally};

mod debian;
mod guest;
mod systemd;

pub(crate) use debian::Kernel;
use guest::Guest;

/// The kernel that `cargo xtask test --all` runs: Debian 12's, whose verifier is stricter than later ones.
pub(crate) const IN_EVERY_RUN: Kernel = Kernel::V6_1;

/// Cases that need a feature of later kernels, and that feature.
const LATER: &[(&str, &str)] = &[
    ("connects::failed_then_retried_on_one_socket", "failing a connect: bpf_set_retval, 6.1"),
    ("connects::ipv6", "failing a connect: bpf_set_retval, 6.1"),
    ("connects::down_and_closed_fail_at_connect", "failing a connect: bpf_set_retval, 6.1"),
    ("connects::routes_of_any_port", "failing a connect: bpf_set_retval, 6.1"),
    ("connects::mptcp", "the sysctl net.mptcp.enabled in every namespace"),
    ("networks::neighbour_cannot_claim_a_virtual_address_as_source", "the interface in lookups: 5.17"),
    ("lifecycle::programs_fit_the_instruction_budget", "the count of verified instructions: 5.16"),
    ("modules::", "the cookie of a case's network namespace: 5.14"),
    ("by_route::", "the cookie of a case's network namespace: 5.14"),
    ("scale::a_hundred_thousand_nodes_by_route", "the cookie of a case's network namespace: 5.14"),
    ("scale::uplinks_beside_a_full_routing_table", "the cookie of a case's network namespace: 5.14"),
    (
        "failures::programs_come_back_while_ipv6_is_switched_off",
        "the cookie of a case's network namespace: 5.14",
    ),
    (
        "failures::this_kernel_needs_no_perfmon",
        "a verifier that takes the programs from a process without CAP_PERFMON: 6.1 does not",
    ),
];

fn left_out(kernel: Kernel) -> &'static [(&'static str, &'static str)] {
    match kernel {
        Kernel::V5_10 => LATER,
        // Only the last one.
        Kernel::V6_1 | Kernel::V6_12 => &LATER[LATER.len() - 1..],
        Kernel::Backports => &[],
    }
}

/// Commands that run in the machine, by name. Emulated processors are some twenty times slower, so that the cases that measure
/// would miss their deadlines: they are skipped.
fn cases(kernel: Kernel, emulated: bool) -> Vec<(&'static str, String)> {
    let skipped = left_out(kernel).iter().map(|(case, _)| *case).chain(emulated.then_some("scale::"));
    let skip: String = skipped.map(|case| format!(" --skip {case}")).collect();
    // Linux 5.10 charges maps and programs to RLIMIT_MEMLOCK, which only some of the tests' programs may raise.
    let tests = format!("ulimit -l unlimited; ./redirect_kernel --color=never{skip}");
    let mut cases = vec![
        ("redirect", tests.clone()),
        // As in a node of kind, whose cgroup namespace shows a subtree as the whole hierarchy. (Only the real root has no
        // cgroup.type.)
        (
            "nested cgroup",
            format!(
                "mkdir -p /sys/fs/cgroup/kind/node && echo 0 > /sys/fs/cgroup/kind/node/cgroup.procs && \
                 unshare --cgroup --mount sh -c 'umount /sys/fs/cgroup && mount -t cgroup2 cgroup2 /sys/fs/cgroup && \
                 test -e /sys/fs/cgroup/cgroup.type && {{ {tests} connects::; }}'"
            ),
        ),
        // Run alone: it attaches to the root of the machine's cgroups.
        (
            "pod",
            "ulimit -l unlimited; POSTERN_KERNEL_WHOLE_MACHINE=1 ./redirect_kernel --color=never pod::"
                .to_owned(),
        ),
        ("demo", format!("POSTERN_DEMO_PACE={} ./demo", if emulated { 5 } else { 1 })),
    ];
    // By route in a network namespace of their own, as those left out there.
    if kernel != Kernel::V5_10 {
        let modules = "modprobe --all ip_vs_rr vrf && \
             POSTERN_KERNEL_WHOLE_MACHINE=1 ./redirect_kernel --color=never modules::";
        cases.push(("modules", modules.to_owned()));
    }
    cases
}

/// Programs of ours in the machine.
pub(crate) fn programs() -> Vec<&'static str> {
    PROGRAMS.iter().chain(&["redirect_kernel", "demo", systemd::PROGRAM]).copied().collect()
}

/// Boots the kernel with the programs that have been built, and counts the results of its tests.
pub(crate) fn run(kernel: Kernel, chosen: &Names, tally: &mut Tally) -> Result<()> {
    packages::install(&[packages::TESTBED, packages::DEMO, packages::VIRTUAL_MACHINE])?;
    let unpacked = debian::unpacked(kernel)?;
    let emulated = !has_virtualisation();
    let mut cases = cases(kernel, emulated);
    cases.retain(|(name, _)| chosen.select(name));
    for (case, needs) in left_out(kernel) {
        tally.skip(format!("kernel::{}: {case}", name_of(&kernel)), format!("it needs {needs}"));
    }
    if emulated {
        tally.skip(
            format!("kernel::{}: scale::", name_of(&kernel)),
            "emulated: this processor cannot virtualise",
        );
    }
    println!(
        "booting {} {}",
        unpacked.version,
        if emulated { "in qemu's emulation: this machine's processor cannot virtualise" } else { "in KVM" }
    );
    let guest = Guest::new(&unpacked)?;
    for name in programs() {
        guest.add_program(name, &built(name)?)?;
    }
    guest.write_script("/init", &guest::init_script(&cases))?;
    systemd::add(&guest)?;
    guest.pack()?;
    let names: Vec<_> = cases.iter().map(|(name, _)| *name).collect();
    // systemd has to be the first process, and gets a machine of its own: no case leaves anything for another there.
    let with_systemd = if chosen.select(systemd::CASE) { vec![systemd::CASE] } else { Vec::new() };
    ensure!(names.len() + with_systemd.len() > 0, "no case has a name with {:?}", chosen.given());
    for (init, names) in [("init", names), (systemd::INIT, with_systemd)] {
        if names.is_empty() {
            continue;
        }
        let hung = run_cases((&guest, init), (kernel, emulated), &names, emulated, tally)?;
        if !hung.is_empty() {
            cases.retain(|(name, _)| hung.contains(name));
            guest.write_script("/init", &guest::init_script(&cases))?;
            guest.pack()?;
            run_cases((&guest, init), (kernel, emulated), &hung, false, tally)?;
        }
    }
    Ok(())
}

/// Boots a machine, and counts the results of these cases in it. An emulated processor may stop for good: if the machine `may_hang`,
/// it returns the cases that have not ended, to be run in another one, and the last line names them. A kernel that crashes ends the
/// machine, and is a failure.
fn run_cases(
    (guest, init): (&Guest<'_>, &str),
    (kernel, emulated): (Kernel, bool),
    names: &[&'static str],
    may_hang: bool,
    tally: &mut Tally,
) -> Result<Vec<&'static str>> {
    let case = |name: &str| format!("kernel::{}: {name}", name_of(&kernel));
    let (mut machine, results) = guest.machine(init, emulated)?;
    let Counted { status, uncounted, last_line, .. } = tally.counted(&mut machine, &mut || {})?;
    let results = files::text(&results)?;
    let (mut hung, mut ended): (Vec<_>, Vec<_>) =
        names.iter().copied().partition(|name| exit_code(&results, name).is_none());
    if !status.success() && hung.is_empty() {
        tally.fail(format!("{}: the machine ended with {status} after its last case", case(init)));
    }
    if may_hang && !uncounted && status.code() == Some(guest::TIMED_OUT) {
        for name in &hung {
            let reason = format!("it did not end there; the last line was {last_line:?}");
            tally.skip(format!("{} in the first of two machines", case(name)), reason);
        }
    } else {
        ended.append(&mut hung);
    }
    for name in ended {
        tally.step(&case(name), succeeded(&results, name, &last_line));
    }
    Ok(hung)
}

/// Reads a case's exit code from lines such as `redirect=0`.
fn exit_code<'a>(results: &'a str, name: &str) -> Option<&'a str> {
    results.lines().find_map(|line| line.trim().strip_prefix(name)?.strip_prefix('='))
}

/// `last_line`: of the machine's output.
fn succeeded(results: &str, name: &str, last_line: &str) -> Result<()> {
    match exit_code(results, name) {
        Some("0") => Ok(()),
        Some(code) => bail!("it ended with {code}"),
        None => {
            bail!("it did not end: the kernel crashed, or took too long; the last line was {last_line:?}")
        }
    }
}

/// Reports whether KVM can be used. /dev/kvm may exist although the processor cannot virtualise, as in some virtual machines:
/// only kernels made for those boot there.
fn has_virtualisation() -> bool {
    let processor = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let can = processor.split_whitespace().any(|flag| flag == "vmx" || flag == "svm");
    can && fs::OpenOptions::new().read(true).write(true).open("/dev/kvm").is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_case_that_did_not_end_is_a_failure() {
        let results = "redirect=0\r\nnested cgroup=101\r\n";
        let of = |name| succeeded(results, name, "boom");
        of("redirect").unwrap();
        assert!(of("nested cgroup").unwrap_err().to_string().contains("101"));
        let error = of("demo").unwrap_err().to_string();
        assert!(error.contains("did not end") && error.contains("boom"), "{error}");
    }

    #[test]
    fn an_old_kernel_leaves_out_more_cases() {
        let (_, new) = &cases(Kernel::Backports, false)[0];
        assert!(!new.contains("--skip"), "{new}");
        let (_, between) = &cases(Kernel::V6_1, false)[0];
        assert_eq!(between.matches("--skip").count(), 1, "{between}");
        assert!(between.ends_with("--skip failures::this_kernel_needs_no_perfmon"), "{between}");
        let (_, old) = &cases(Kernel::V5_10, true)[0];
        assert!(old.contains("--skip connects::ipv6 ") && old.ends_with("--skip scale::"), "{old}");
    }
}
