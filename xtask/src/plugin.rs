//! kubectl's plugin (deploy/krew) as a release has it.
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};

use crate::archive::{copy, pack, write};
use crate::command::root;
use crate::image::VERSION;
use crate::image::oci::digest;

/// kubectl's plugin, and its manifest for krew.
pub(crate) fn write_release(out: &Path, epoch: u64) -> Result<()> {
    let contents = tempfile::tempdir().context("a folder for the plugin")?;
    for file in ["deploy/krew/kubectl_complete-postern", "LICENSE"] {
        let from = root().join(file);
        copy(&from, &contents.path().join(from.file_name().unwrap_or_default()))?;
    }
    let script = contents.path().join("kubectl-postern");
    write(&script, &released_script()?)?;
    fs::set_permissions(&script, Permissions::from_mode(0o755)).context("the plugin's script")?;
    let archive = out.join(format!("kubectl-postern-{VERSION}.tar.gz"));
    pack(epoch, contents.path(), &archive, &["LICENSE", "kubectl-postern", "kubectl_complete-postern"])?;
    let bytes = fs::read(&archive).with_context(|| format!("reading {}", archive.display()))?;
    let manifest = include_str!("../../deploy/krew/plugin.yaml");
    let manifest =
        manifest.replace("VERSION", VERSION).replace("SHA256", digest(&bytes).trim_start_matches("sha256:"));
    write(&out.join("postern.yaml"), &manifest)
}

/// The plugin as one file, with its version.
fn released_script() -> Result<String> {
    let mut script = include_str!("../../deploy/krew/kubectl-postern").to_owned();
    let included = include_str!("../../deploy/krew/check.sh");
    let reads = r#". "$(dirname "$(readlink -f "$0")")/check.sh""#;
    for (from, to) in
        [("version='(not of a release)'", format!("version='{VERSION}'")), (reads, included.to_owned())]
    {
        ensure!(script.matches(from).count() == 1, "deploy/krew/kubectl-postern: {from} is not there once");
        script = script.replace(from, &to);
    }
    Ok(script)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::process::Output;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::command::{program, run};

    /// dash, which is Debian's sh, and bash.
    const SHELLS: [&str; 2] = ["dash", "bash"];

    /// The plugin with a kubectl that only answers.
    struct Bench {
        folder: tempfile::TempDir,
        shell: &'static str,
    }

    /// Exit code, standard output, and standard error.
    type Said = (i32, String, String);

    impl Bench {
        fn new(shell: &'static str) -> Self {
            let folder = tempfile::tempdir().unwrap();
            for (name, text) in
                [("kubectl", include_str!("fake-kubectl").to_owned()), ("plugin", released_script().unwrap())]
            {
                let path = folder.path().join(name);
                fs::write(&path, text).unwrap();
                fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
            }
            Self { folder, shell }
        }

        fn file(&self, name: &str) -> PathBuf {
            self.folder.path().join(name)
        }

        fn with(self, file: &str, text: &str) -> Self {
            fs::write(self.file(file), text).unwrap();
            self
        }

        fn run(&self, words: &[&str]) -> Said {
            let mut plugin = program(self.shell);
            plugin.arg(self.file("plugin")).args(words).env("KUBECTL", self.file("kubectl"));
            let Output { status, stdout, stderr } = plugin.output().unwrap();
            let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
            (status.code().unwrap(), text(stdout), text(stderr))
        }

        /// Returns the words of kubectl's last call.
        fn last_call(&self) -> String {
            let calls = fs::read_to_string(self.file("calls")).unwrap();
            calls.lines().next_back().unwrap().to_owned()
        }
    }

    #[test]
    fn flags_of_kubectl_stand_anywhere() {
        const EXEC: &str = "<exec><tunnel-server-b><--container=tunnel-server><--></tunnel-server>";
        const ONE: &str = "<exec><tunnel-server-a><--container=tunnel-server><--></tunnel-server>";
        const OURS: &str = "<--namespace=kube-system>";
        for shell in SHELLS {
            let bench = Bench::new(shell);
            for (words, call) in [
                (
                    &["--context", "my 'own' $x", "test", "edge-1"][..],
                    format!("<--context=my 'own' $x>{OURS}{EXEC}<test><edge-1>"),
                ),
                (
                    &["test", "--kubeconfig=/a b/*", "edge-1", "--port", "1"],
                    format!("<--kubeconfig=/a b/*>{OURS}{EXEC}<test><edge-1><--port><1>"),
                ),
                (
                    &["test", "edge-1", "-n", "a", "--as", "me"],
                    format!("<--as=me><--namespace=a>{EXEC}<test><edge-1>"),
                ),
                (&["-na", "test", "edge-1"], format!("<--namespace=a>{EXEC}<test><edge-1>")),
                (&["-n=a", "test", "edge-1"], format!("<--namespace=a>{EXEC}<test><edge-1>")),
                (&["test", "--namespace", "a", "--all"], format!("<--namespace=a>{EXEC}<test><--all>")),
                (
                    &["test", "edge-1", "--request-timeout=5s", "--", "-n", "a"],
                    format!("<--request-timeout=5s>{OURS}{EXEC}<test><edge-1><-n><a>"),
                ),
                (&["--", "test", "edge-1"], format!("{OURS}{EXEC}<test><edge-1>")),
                (
                    &["agent", "revoke", "--server", "cloud-1", "-s", "https://x"],
                    format!("<-s=https://x>{OURS}{ONE}<agent><--in-cluster><revoke><--server><cloud-1>"),
                ),
                (
                    &["--server", "https://x", "agent", "list"],
                    format!("<--server=https://x>{OURS}{ONE}<agent><--in-cluster><list>"),
                ),
                (&["ca", "retire", "--force"], format!("{OURS}{ONE}<ca><--in-cluster><retire><--force>")),
                (
                    &["token", "create", "--node", "edge-1"],
                    format!("{OURS}{ONE}<token><create><--node><edge-1>"),
                ),
                (&["token", "list"], format!("{OURS}{EXEC}<token><list>")),
                (
                    &["doctor", "edge-1", "--user", "me"],
                    format!(
                        "<--user=me>{OURS}<exec><tunnel-agent-x><--container=tunnel-agent><--></tunnel-agent><doctor>"
                    ),
                ),
                (
                    &["status", "--connections", "edge-1", "--all"],
                    format!("{OURS}{EXEC}<status><--connections><edge-1><--all>"),
                ),
            ] {
                let (code, ..) = bench.run(words);
                assert_eq!((code, bench.last_call()), (0, call), "{shell} {words:?}");
            }
            for (words, reason) in [
                (&["test", "edge-1", "--context"][..], "--context needs a value"),
                (&["-n"], "-n needs a value"),
                (&["--wait", "check"], "--wait is not known before the command"),
                (&["check", "--now"], "check: --now is not known"),
                (&["check", "--wait=soon"], "--wait=soon: not a duration"),
                (&["test", "--context", "x"], "test needs the name of a node"),
                (&["nonsense"], "there is no command nonsense"),
            ] {
                let (code, _, errors) = bench.run(words);
                assert_eq!((code, errors.contains(reason)), (64, true), "{shell} {words:?}: {errors}");
            }
            assert_eq!(bench.run(&[]).0, 64);
            assert_eq!(bench.run(&["test", "--help"]).0, 0);
        }
    }

    #[test]
    fn a_check_tells_what_is_broken_from_what_is_offline() {
        const SKEW: &str = "skew: 2 tunnel-agent have version 0.0.9, and the servers 0.1.0: update them\n";
        const NOT: &str = "skew: 1 tunnel-agent have version 0.2.0, and the servers 0.1.0: not supported: update the servers first\n";
        for shell in SHELLS {
            for (file, text, words, code, shown) in [
                (
                    "none",
                    "",
                    &["check"][..],
                    1,
                    "WARNING  nodes              2 of 3 connected; the others are not Ready: edge-3",
                ),
                ("none", "", &["check", "--wait"], 1, "ok       tunnel-server-b    doctor: 14 ok"),
                (
                    "edge-3",
                    "Ready",
                    &["check"],
                    2,
                    "BROKEN   nodes              2 of 3 connected; no tunnel, although the node is Ready: edge-3",
                ),
                ("edge-3", "Ready", &["check", "--wait=1s"], 2, "no tunnel"),
                ("late", "yes", &["check"], 2, "BROKEN   tunnel-server      no such DaemonSet"),
                ("late", "yes", &["check", "--wait"], 1, "ok       tunnel-server      2 of 2 nodes"),
                (
                    "skew",
                    SKEW,
                    &["check"],
                    1,
                    "WARNING  versions           2 tunnel-agent have version 0.0.9",
                ),
                ("skew", NOT, &["check"], 2, "BROKEN   versions           1 tunnel-agent have version 0.2.0"),
                (
                    "none",
                    "",
                    &["check", "-n", "absent"],
                    2,
                    "BROKEN   servers            no pod of tunnel-server runs in namespace absent",
                ),
                ("none", "", &["check", "--pre"], 0, "ok       kernel of master-1 6.1.0-18-amd64"),
                (
                    "minor",
                    "29",
                    &["check", "--pre"],
                    1,
                    "WARNING  Kubernetes         1.29\n           fix: add the component kubelet-credentials",
                ),
                ("minor", "9", &["check", "--pre"], 2, "BROKEN   Kubernetes         1.9"),
                (
                    "kernel",
                    "5.15.0-91-generic",
                    &["check", "--pre"],
                    1,
                    "WARNING  kernel of master-1 5.15.0-91-generic: connects",
                ),
                (
                    "kernel",
                    "4.18.0-553.el8.x86_64",
                    &["check", "--pre"],
                    2,
                    "BROKEN   kernel of master-1 4.18",
                ),
                ("denied", "approve", &["check", "--pre"], 2, "missing: approve signers"),
                (
                    "denied",
                    "subresource=exec",
                    &["check", "--pre"],
                    1,
                    "WARNING  rights to operate  missing: create pods --subresource=exec\n",
                ),
            ] {
                let bench = Bench::new(shell).with(file, text);
                let (ended, out, errors) = bench.run(words);
                assert_eq!(
                    (ended, out.contains(shown)),
                    (code, true),
                    "{shell} {words:?} {file}: {out}{errors}"
                );
                let waits = words.contains(&"--wait") && file == "late";
                let is_open = words.contains(&"--wait=1s");
                assert!(
                    is_open || errors.contains("waiting: ") == waits,
                    "{shell} {words:?} {file}: {errors}"
                );
            }
        }
    }

    #[test]
    fn versions_are_listed_and_skew_is_named() {
        for shell in SHELLS {
            let bench = Bench::new(shell).with("skew", "skew: because\n");
            let (code, out, _) = bench.run(&["version"]);
            let expected = format!(
                "kubectl-postern {VERSION}\ntunnel-agent 0.1.0: 2\ntunnel-server 0.1.0: 2\nskew: because\n"
            );
            assert_eq!((code, out), (0, expected));
        }
    }

    #[test]
    fn completion_knows_commands_nodes_and_flags() {
        for shell in SHELLS {
            let bench = Bench::new(shell);
            let complete = |words: &[&str]| {
                let (code, out, errors) = bench.run(&[&["__complete"], words].concat());
                assert_eq!((code, errors), (0, String::new()), "{shell} {words:?}");
                out.lines()
                    .map(|line| line.split('\t').next().unwrap().to_owned())
                    .collect::<Vec<_>>()
                    .join(" ")
            };
            let commands = "check status doctor test bench logs bundle page agent ca token version :4";
            assert_eq!(complete(&["st"]), commands);
            assert_eq!(complete(&["--context", "x", ""]), commands);
            assert_eq!(complete(&["test", "-n", "x", ""]), "edge-1 --all --port --output :4");
            assert!(bench.last_call().starts_with("<--namespace=x>"));
            assert_eq!(complete(&["agent", ""]), "revoke readmit list --server :4");
            assert_eq!(complete(&["agent", "revoke", "e"]), "edge-1 --server :4");
            assert_eq!(complete(&["test", "--context", ""]), "");
            assert_eq!(complete(&["--nonsense", ""]), "");
        }
    }

    #[test]
    fn what_follows_a_log_ends_with_the_plugin() {
        for shell in SHELLS {
            let bench = Bench::new(shell);
            let mut plugin = program(shell);
            plugin.arg(bench.file("plugin")).args(["logs", "edge-1", "--follow"]);
            let mut plugin = plugin.env("KUBECTL", bench.file("kubectl")).spawn().unwrap();
            let deadline = Instant::now() + Duration::from_secs(60);
            // The servers' log ends then, and the agent's does not.
            while fs::read_to_string(bench.file("follower")).unwrap_or_default().is_empty() {
                assert!(Instant::now() < deadline, "{shell}: the agent's log is not followed");
                std::thread::sleep(Duration::from_millis(10));
            }
            run(program("kill").arg(plugin.id().to_string())).unwrap();
            assert_eq!(plugin.wait().unwrap().code(), Some(130), "{shell}");
            let follower = fs::read_to_string(bench.file("follower")).unwrap();
            let state = || {
                let stat = fs::read_to_string(Path::new("/proc").join(follower.trim()).join("stat"));
                stat.unwrap_or_default()
            };
            while !state().is_empty() && !state().contains(") Z ") {
                assert!(Instant::now() < deadline, "{shell}: kubectl is left: {}", state());
                std::thread::sleep(Duration::from_millis(10));
            }
        }
    }

    #[test]
    fn the_plugin_is_packed_for_krew() {
        let out = tempfile::tempdir().unwrap();
        write_release(out.path(), 1_700_000_000).unwrap();
        let archive = out.path().join(format!("kubectl-postern-{VERSION}.tar.gz"));
        let bytes = fs::read(&archive).unwrap();
        let manifest = fs::read_to_string(out.path().join("postern.yaml")).unwrap();
        let sum = digest(&bytes);
        assert!(manifest.contains(&format!("sha256: {}\n", sum.trim_start_matches("sha256:"))), "{manifest}");
        assert!(manifest.contains(&format!("  version: v{VERSION}\n")), "{manifest}");
        assert!(manifest.contains(&format!("/kubectl-postern-{VERSION}.tar.gz\n")), "{manifest}");
        run(program("tar").args(["--extract", "--gzip", "--file"]).arg(&archive).current_dir(out.path()))
            .unwrap();
        let usage = program("./kubectl-postern").arg("--help").current_dir(out.path()).output().unwrap();
        assert!(usage.status.success() && usage.stdout.starts_with(b"kubectl postern COMMAND"), "{usage:?}");
        // Without a server there is nothing behind its own version, and without kubectl no cluster.
        for (command, shown) in
            [("version", format!("kubectl-postern {VERSION}\n")), ("check", "BROKEN".to_owned())]
        {
            let mut script = program("./kubectl-postern");
            let said = script.arg(command).env("KUBECTL", "false").current_dir(out.path()).output().unwrap();
            assert!(said.stdout.starts_with(shown.as_bytes()), "{said:?}");
        }
        let completion = fs::metadata(out.path().join("kubectl_complete-postern")).unwrap();
        assert_eq!(completion.permissions().mode() & 0o111, 0o111);
        write_release(out.path(), 1_700_000_000).unwrap();
        assert_eq!(digest(&fs::read(&archive).unwrap()), sum, "other bytes of the same files");
    }
}
