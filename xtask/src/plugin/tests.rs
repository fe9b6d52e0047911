mod limits;

use std::path::PathBuf;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use super::*;
use crate::command::{program, run};

/// Output of `--summary`, from its own test: with agents of its version, of the last one, and of the next.
const SUMMARIES: &str = include_str!("../../../tunnel-server/src/status/summary.txt");

type Shell = &'static [&'static str];

/// dash, which is Debian's sh, bash, and busybox with its own tools, if it is there.
fn shells() -> Vec<Shell> {
    let mut shells: Vec<Shell> = vec![&["dash"], &["bash"]];
    if program("busybox").arg("true").status().is_ok() {
        shells.push(&["busybox", "sh"]);
    }
    shells
}

/// Tests at the same time: what they do is to wait.
fn in_shells(test: impl Fn(Shell) + Sync) {
    let test = &test;
    std::thread::scope(|scope| shells().into_iter().for_each(|shell| drop(scope.spawn(move || test(shell)))));
}

/// The plugin with a kubectl that only answers.
struct Bench {
    folder: tempfile::TempDir,
    shell: Shell,
}

/// Exit code, standard output, and standard error.
type Said = (i32, String, String);

impl Bench {
    fn new(shell: Shell) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in
            [("kubectl", include_str!("../fake-kubectl").to_owned()), ("plugin", released_script().unwrap())]
        {
            let (source, path) = (folder.path().join(format!("{name}.source")), folder.path().join(name));
            fs::write(&source, text).unwrap();
            // Another test's child may have inherited a file that this process writes, which is then busy for execve(2).
            run(program("install").arg("--mode=755").args([source, path])).unwrap();
        }
        let bench = Self { folder, shell };
        bench.with("summary", SUMMARIES.split("\n\n").next().unwrap())
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn with(self, file: &str, text: &str) -> Self {
        fs::write(self.file(file), text).unwrap();
        self
    }

    fn command(&self, words: &[&str]) -> Command {
        // A program that a script starts in the background ignores SIGINT, and a shell cannot trap what it inherits so.
        let mut plugin = program("env");
        plugin.arg("--default-signal=INT").args(self.shell).arg(self.file("plugin")).args(words);
        plugin.env("KUBECTL", self.file("kubectl"));
        plugin
    }

    fn run(&self, words: &[&str]) -> Said {
        fs::remove_file(self.file("calls")).ok();
        let Output { status, stdout, stderr } = self.command(words).output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (status.code().unwrap(), text(stdout), text(stderr))
    }

    /// Returns the words of kubectl's calls in the last run.
    fn calls(&self) -> Vec<String> {
        let calls = fs::read_to_string(self.file("calls")).unwrap_or_default();
        calls.lines().map(str::to_owned).collect()
    }
}

#[test]
fn flags_of_kubectl_stand_anywhere() {
    const EXEC: &str = "<exec><tunnel-server-b><--container=tunnel-server><--></tunnel-server>";
    const ONE: &str = "<exec><tunnel-server-a><--container=tunnel-server><--></tunnel-server>";
    const OURS: &str = "<--namespace=kube-system>";
    in_shells(|shell| {
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
            (&["doctor", "-o", "json"], format!("{OURS}{EXEC}<doctor><-o><json>")),
            (&["ca", "retire", "--force"], format!("{OURS}{ONE}<ca><--in-cluster><retire><--force>")),
            (&["token", "create", "--node", "edge-1"], format!("{OURS}{ONE}<token><create><--node><edge-1>")),
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
            let calls = bench.calls();
            assert!(code == 0 && calls.contains(&call), "{shell:?} {words:?}: {code}, {calls:?}");
        }
        for (words, reason) in [
            (&["test", "edge-1", "--context"][..], "--context needs a value"),
            (&["-n"], "-n needs a value"),
            (&["--wait", "check"], "--wait is not known before the command"),
            (&["check", "--now"], "check: --now is not known"),
            (&["check", "--wait=soon"], "--wait=soon: not a duration"),
            (&["check", "--wait=9999999"], "--wait=9999999: not a duration"),
            (&["check", "--wait=1h30"], "--wait=1h30: not a duration"),
            (&["test", "--context", "x"], "test needs the name of a node"),
            (&["test", "-o", "json", "edge-1"], "test needs the name of a node, before flags"),
            (&["doctor", "-o", "json", "edge-1"], "NODE comes before flags"),
            (&["doctor", "--output=json", "edge-1"], "NODE comes before flags"),
            (&["status", "--watch", "--connections"], "--connections goes without --watch"),
            (&["nonsense"], "there is no command nonsense"),
        ] {
            let (code, _, errors) = bench.run(words);
            assert_eq!((code, errors.contains(reason)), (64, true), "{shell:?} {words:?}: {errors}");
        }
        assert_eq!(bench.run(&[]).0, 64);
        assert_eq!(bench.run(&["test", "--help"]).0, 0);
    });
}

/// A file with its content, the flags of `check`, its exit code, and a part of what it prints.
type Case = (&'static str, &'static str, &'static [&'static str], i32, &'static str);

fn check(cases: &[Case]) {
    in_shells(|shell| {
        for (file, text, words, code, shown) in cases {
            let (ended, out, errors) = Bench::new(shell).with(file, text).run(words);
            let context = format!("{shell:?} {words:?} {file}: {out}{errors}");
            assert_eq!((ended, out.contains(shown)), (*code, true), "{context}");
            let waits = *file == "late" && words.contains(&"--wait");
            let is_open = words.contains(&"--wait=1s");
            assert!(is_open || errors.contains("waiting: ") == waits, "{context}");
        }
    });
}

#[test]
fn a_check_tells_what_is_broken_from_what_is_offline() {
    const ALL_READY: &str = "edge-1 Ready\nedge-3 Ready,SchedulingDisabled\n";
    let [older, newer] = [1, 2].map(|case| SUMMARIES.split("\n\n").nth(case).unwrap());
    check(&[
        (
            "none",
            "",
            &["check"],
            1,
            "WARNING  nodes              2 of 3 connected; the others are not Ready: edge-3",
        ),
        ("none", "", &["check", "--wait"], 1, "ok       tunnel-server-b    doctor: 14 ok"),
        (
            "nodes",
            ALL_READY,
            &["check"],
            2,
            "BROKEN   nodes              2 of 3 connected; no tunnel, although the node is Ready: edge-3",
        ),
        ("nodes", ALL_READY, &["check", "--wait=1s"], 2, "no tunnel"),
        ("late", "yes", &["check"], 2, "BROKEN   tunnel-server      no such DaemonSet"),
        ("late", "yes", &["check", "--wait"], 1, "ok       tunnel-server      2 of 2 nodes"),
        (
            "summary",
            older,
            &["check", "--wait"],
            1,
            "WARNING  versions           2 tunnel-agent have version 0.1.0",
        ),
        ("summary", newer, &["check"], 1, "WARNING  versions           2 tunnel-agent have version 0.3.0"),
        (
            "summary",
            "skew: 2 tunnel-agent have version 0.4.0, and the servers 0.2.0: not supported: update the servers first\n",
            &["check"],
            2,
            "BROKEN   versions           2 tunnel-agent have version 0.4.0",
        ),
        // Of three nodes edge-3 is not Ready.
        (
            "agents",
            "tunnel-agent|1|1|3|2|2|RollingUpdate",
            &["check", "--wait"],
            1,
            "WARNING  tunnel-agent       2 of 3 nodes are updated; 1 are not Ready\n",
        ),
        (
            "agents",
            "tunnel-agent|1|1|3|1|1|OnDelete",
            &["check", "--wait=08m"],
            1,
            "WARNING  tunnel-agent       1 of 3 nodes are updated\n",
        ),
        (
            "agents",
            "tunnel-agent|1|1|3|1|1|RollingUpdate",
            &["check", "--wait=1s"],
            2,
            "BROKEN   wait               after 1 s: tunnel-agent: is being updated: 1 of 3 nodes\n",
        ),
        (
            "fails",
            " exec tunnel-redirector-a ",
            &["check"],
            2,
            "BROKEN   tunnel-redirector-a does not answer\n           fix: kubectl -n kube-system describe pod tunnel-redirector-a\nWARNING  nodes              2 of 3 connected",
        ),
        // Only the redirector answers then.
        (
            "fails",
            " exec tunnel-server-",
            &["check"],
            2,
            "BROKEN   tunnel-server-b    doctor: error: no answer\nWARNING  nodes              2 of 3 connected",
        ),
        ("fails", " get nodes ", &["check"], 2, "the cluster does not say whether the others are Ready"),
        (
            "none",
            "",
            &["check", "-n", "absent"],
            2,
            "BROKEN   servers            no pod of tunnel-server runs in namespace absent",
        ),
    ]);
}

#[test]
fn a_check_before_the_installation_names_what_the_cluster_lacks() {
    const PRE: &[&str] = &["check", "--pre"];
    const CHOSEN: &[&str] = &["check", "--pre=infra=yes"];
    check(&[
        ("none", "", PRE, 0, "ok       kernel of master-1 6.1.0-18-amd64"),
        (
            "minor",
            "29",
            PRE,
            1,
            "WARNING  Kubernetes         1.29\n           fix: add the component kubelet-credentials",
        ),
        ("minor", "9", PRE, 2, "BROKEN   Kubernetes         1.9"),
        ("kernel", "5.15.0-91-generic", PRE, 1, "WARNING  kernel of master-1 5.15.0-91-generic: connects"),
        ("kernel", "4.18.0-553.el8.x86_64", PRE, 2, "BROKEN   kernel of master-1 4.18"),
        ("role", "worker", PRE, 1, "WARNING  masters            no node has the label of one\n"),
        // Neither the role of other nodes nor their kernel matters where the servers have nodes of their own.
        ("role", "worker", CHOSEN, 0, "ok       kernel of infra-1  6.1.0-18-amd64"),
        ("kernel", "4.18.0-553.el8.x86_64", CHOSEN, 0, "ok       kernel of infra-1  6.1.0-18-amd64"),
        ("infra", "", CHOSEN, 2, "BROKEN   servers' nodes     none matches infra=yes\n"),
        ("denied", "approve", PRE, 2, "missing: approve signers"),
        (
            "denied",
            "subresource=exec",
            PRE,
            1,
            "WARNING  rights to operate  missing: create pods --subresource=exec\n",
        ),
        (
            "fails",
            " get nodes ",
            PRE,
            2,
            "ok       namespace          kube-system\nBROKEN   nodes              error: no answer\n",
        ),
    ]);
}

#[test]
fn a_check_judges_more_nodes_than_it_names() {
    let names = |range: std::ops::Range<usize>| range.map(|n| format!(" n{n:03}"));
    let summary = SUMMARIES.split("\n\n").next().unwrap();
    let summary = summary.replace(" edge-3", &names(0..120).collect::<String>());
    let nodes: String = names(0..120)
        .enumerate()
        .map(|(n, name)| format!("{} {}\n", name.trim(), if n < 60 { "NotReady" } else { "Ready" }))
        .collect();
    let named: String = names(60..110).collect();
    for shell in shells() {
        let bench = Bench::new(shell).with("summary", &summary).with("nodes", &nodes);
        let (code, out, errors) = bench.run(&["check"]);
        let expected = format!("although the node is Ready:{named} and 10 more\n");
        assert_eq!((code, out.contains(&expected)), (2, true), "{shell:?}: {out}{errors}");
    }
}

#[test]
fn what_does_not_answer_is_no_warning() {
    for shell in shells() {
        for (file, text, words, code) in [
            ("none", "", &["test", "--all"][..], 0),
            ("ends", "1", &["test", "--all"], 1),
            ("ends", "1", &["doctor", "edge-1"], 1),
            ("ends", "137", &["doctor"], 137),
            ("fails", " exec ", &["test", "--all"], 2),
            ("fails", " exec tunnel-server-a ", &["doctor"], 2),
            ("fails", " exec ", &["doctor", "edge-1"], 2),
            ("fails", " get pods ", &["doctor", "edge-1"], 2),
            ("fails", " get pods ", &["test", "edge-1"], 2),
            ("none", "", &["doctor", "-n", "absent"], 2),
            ("none", "", &["doctor", "edge-1", "-n", "absent"], 2),
            ("fails", " exec ", &["agent", "list"], 1),
            ("none", "", &["status", "-n", "absent"], 1),
        ] {
            let (ended, out, errors) = Bench::new(shell).with(file, text).run(words);
            assert_eq!(ended, code, "{shell:?} {words:?} {file}: {out}{errors}");
            // Nor is a list that is refused an empty one.
            assert_eq!(errors.contains(" runs "), words.contains(&"absent"), "{shell:?} {words:?}: {errors}");
        }
    }
}

#[test]
fn the_last_lines_of_a_log_are_about_the_node() {
    for shell in shells() {
        let (code, out, errors) = Bench::new(shell).run(&["logs", "edge-1", "--tail", "2"]);
        let expected = " node=edge-1 two\n node=edge-1 three\n";
        assert_eq!((code, out.as_str()), (0, expected), "{shell:?}: {errors}");
    }
}

#[test]
fn versions_are_listed_and_skew_is_named() {
    for shell in shells() {
        let summary = SUMMARIES.split("\n\n").nth(1).unwrap();
        let bench = Bench::new(shell).with("summary", summary);
        let (code, out, _) = bench.run(&["version"]);
        let listed = summary.split("nodes: ").next().unwrap();
        let expected = format!("kubectl-postern {VERSION}\n{listed}");
        assert_eq!((code, out), (0, expected));
    }
}

#[test]
fn completion_knows_commands_nodes_and_flags() {
    for shell in shells() {
        let bench = Bench::new(shell);
        let complete = |words: &[&str]| {
            let (code, out, errors) = bench.run(&[&["__complete"], words].concat());
            assert_eq!((code, errors), (0, String::new()), "{shell:?} {words:?}");
            out.lines().map(|line| line.split('\t').next().unwrap().to_owned()).collect::<Vec<_>>().join(" ")
        };
        let commands = "check status doctor test bench logs bundle page agent ca token version :4";
        assert_eq!(complete(&["st"]), commands);
        assert_eq!(complete(&["--context", "x", ""]), commands);
        assert_eq!(complete(&["test", "-n", "x", ""]), "edge-1 edge-3 --all --port --output :4");
        assert!(bench.calls()[0].starts_with("<--request-timeout=30s><--namespace=x>"));
        assert_eq!(complete(&["agent", ""]), "revoke readmit list --server :4");
        assert_eq!(complete(&["agent", "revoke", "e"]), "edge-1 edge-3 --server :4");
        assert_eq!(complete(&["test", "--context", ""]), "");
        assert_eq!(complete(&["--nonsense", ""]), "");
    }
}

#[test]
fn what_follows_a_log_ends_with_the_plugin() {
    for shell in shells() {
        let bench = Bench::new(shell);
        let mut plugin = bench.command(&["logs", "edge-1", "--follow"]).spawn().unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        // The servers' log ends then, and the agent's does not.
        while fs::read_to_string(bench.file("follower")).unwrap_or_default().is_empty() {
            assert!(Instant::now() < deadline, "{shell:?}: the agent's log is not followed");
            std::thread::sleep(Duration::from_millis(10));
        }
        run(program("kill").arg(plugin.id().to_string())).unwrap();
        assert_eq!(plugin.wait().unwrap().code(), Some(130), "{shell:?}");
        let follower = fs::read_to_string(bench.file("follower")).unwrap();
        let state = || {
            let stat = fs::read_to_string(Path::new("/proc").join(follower.trim()).join("stat"));
            stat.unwrap_or_default()
        };
        while !state().is_empty() && !state().contains(") Z ") {
            assert!(Instant::now() < deadline, "{shell:?}: kubectl is left: {}", state());
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
    let sum = sha256(&bytes);
    assert!(manifest.contains(&format!("sha256: {sum}\n")), "{manifest}");
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
    assert_eq!(sha256(&fs::read(&archive).unwrap()), sum, "other bytes of the same files");
}
