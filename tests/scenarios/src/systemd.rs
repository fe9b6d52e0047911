//! The systemd units of deploy/systemd, and the flags in them. `tests/units` starts them in a virtual machine.
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::{Testbed, process};

scenarios! {
    units_are_valid(quick),
    what_a_unit_may_write_is_writable,
}

async fn units_are_valid(testbed: &Testbed) -> Result<()> {
    for name in ["server", "agent"] {
        let (program, unit) = (format!("tunnel-{name}"), format!("postern-{name}@.service"));
        let (text, environment) = (shipped(&unit)?, shipped(&format!("{name}.env"))?);
        let binary = process::program(&program)?;

        // systemd would look for the program where it is installed.
        let installed = format!("ExecStart={program} ");
        ensure!(text.matches(&installed).count() == 1, "{unit} does not start {installed}");
        let path = testbed.dir().join(&unit);
        fs::write(&path, text.replace(&installed, &format!("ExecStart={} ", binary.display())))
            .context("writing the unit")?;
        let mut verify = Command::new("systemd-analyze");
        verify.args(["verify", "--man=no", "--recursive-errors=no"]).arg(&path);
        let output = verify.output().context("running systemd-analyze")?;
        let said = String::from_utf8_lossy(&output.stderr);
        // Unknown settings are only warnings, and the machine's own units cause some too.
        let ours: Vec<_> = said.lines().filter(|line| line.contains("postern-")).collect();
        ensure!(output.status.success() && ours.is_empty(), "systemd-analyze verify {unit}: {said}");

        // Ten times the exposure: without a filter of system calls it would be 35 at least.
        let mut security = Command::new("systemd-analyze");
        security.args(["security", "--offline=true", "--no-pager", "--threshold=30"]).arg(&path);
        let output = security.output().context("running systemd-analyze")?;
        let said = String::from_utf8_lossy(&output.stdout);
        ensure!(output.status.success(), "systemd-analyze security {unit}: {said}");

        let variable = format!("POSTERN_{}_FLAGS", name.to_uppercase());
        ensure!(text.contains(&format!("${variable}\n")), "{unit} does not use {variable}");
        ensure!(environment.contains(&format!("\n{variable}=--")), "{name}.env does not set {variable}");
        let help =
            Command::new(&binary).arg("--help").output().with_context(|| format!("{program} --help"))?;
        let known = flags(&String::from_utf8_lossy(&help.stdout));
        let used = flags(&text).union(&flags(&environment)).cloned().collect::<BTreeSet<_>>();
        let unknown: Vec<_> = used.difference(&known).collect();
        ensure!(used.len() > 2 && unknown.is_empty(), "{program} has no {unknown:?}");
    }
    Ok(())
}

/// Not detected by systemd-analyze: of two settings for one path, the stricter one applies.
async fn what_a_unit_may_write_is_writable(_testbed: &Testbed) -> Result<()> {
    for (unit, expected) in
        [("postern-server@.service", Some("/sys/fs/bpf")), ("postern-agent@.service", None)]
    {
        let text = shipped(unit)?;
        let (writable, read_only) = (words(&text, "ReadWritePaths"), words(&text, "ReadOnlyPaths"));
        ensure!(
            writable == Vec::from_iter(expected),
            "{unit}: ReadWritePaths= has {writable:?} instead of {expected:?}"
        );
        let undone: Vec<_> = writable.iter().filter(|path| read_only.contains(path)).collect();
        ensure!(undone.is_empty(), "{unit}: {undone:?} is read-only too");
        // It makes /sys and folders below it read-only, including /sys/fs/bpf.
        let tunables = words(&text, "ProtectKernelTunables") == ["yes"];
        let below_sys = writable.iter().any(|path| Path::new(path).starts_with("/sys"));
        ensure!(!(tunables && below_sys), "{unit}: ProtectKernelTunables=yes undoes {writable:?}");
        let protected = ["/sys", "/proc/sys"].iter().all(|path| read_only.contains(path));
        ensure!(tunables || protected, "{unit} leaves the kernel's settings writable");
    }
    Ok(())
}

/// Returns the words of a unit's setting, without the marks of paths that need not exist.
fn words<'a>(unit: &'a str, setting: &str) -> Vec<&'a str> {
    let values = unit.lines().filter_map(|line| line.strip_prefix(setting)?.strip_prefix('='));
    values.flat_map(str::split_whitespace).map(|word| word.trim_start_matches('-')).collect()
}

fn shipped(name: &str) -> Result<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/systemd").join(name);
    fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))
}

/// Returns the words that begin with two hyphens.
fn flags(text: &str) -> BTreeSet<String> {
    let is_of_flag = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let words = text.split(|c: char| !is_of_flag(c));
    words.filter(|word| word.len() > 2 && word.starts_with("--")).map(str::to_owned).collect()
}
