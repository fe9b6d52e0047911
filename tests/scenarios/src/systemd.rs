//! The systemd units of deploy/systemd, and the flags in them.
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use postern_testbed::{Testbed, process};

scenarios! {
    units_are_valid,
}

async fn units_are_valid(testbed: &Testbed) -> Result<()> {
    for name in ["server", "agent"] {
        let (program, unit) = (format!("tunnel-{name}"), format!("postern-{name}@.service"));
        let (text, environment) = (shipped(&unit)?, shipped(&format!("{name}.env"))?);
        let binary = process::program(&program)?;

        // systemd looks for the program where it is installed.
        let installed = format!("/usr/local/bin/{program}");
        ensure!(text.matches(&installed).count() == 1, "{unit} does not start {installed}");
        let path = testbed.dir().join(&unit);
        fs::write(&path, text.replace(&installed, &binary.display().to_string()))
            .context("writing the unit")?;
        let mut verify = Command::new("systemd-analyze");
        verify.args(["verify", "--man=no", "--recursive-errors=no"]).arg(&path);
        let output = verify.output().context("running systemd-analyze")?;
        let said = String::from_utf8_lossy(&output.stderr);
        // It takes unknown settings for a warning, and warns of the machine's own units too.
        let ours: Vec<_> = said.lines().filter(|line| line.contains("postern-")).collect();
        ensure!(output.status.success() && ours.is_empty(), "systemd-analyze verify {unit}: {said}");

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

fn shipped(name: &str) -> Result<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/systemd").join(name);
    fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))
}

/// Words that begin with two hyphens.
fn flags(text: &str) -> BTreeSet<String> {
    let is_of_flag = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let words = text.split(|c: char| !is_of_flag(c));
    words.filter(|word| word.len() > 2 && word.starts_with("--")).map(str::to_owned).collect()
}
