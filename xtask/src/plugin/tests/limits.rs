//! Pods that do not answer, many of them, and the end of the plugin before theirs.
use std::os::unix::process::CommandExt as _;
use std::process::Stdio;

use super::*;

const PATIENCE: Duration = Duration::from_secs(60);

/// Returns the names and texts of an archive's files.
fn unpacked(archive: &Path) -> String {
    let to = tempfile::tempdir().unwrap();
    run(program("tar").arg("xzf").arg(archive).arg("-C").arg(to.path())).unwrap();
    let files = |folder: &Path| {
        let mut files: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.sort();
        files
    };
    let text = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy();
        format!("==> {name}\n{}", fs::read_to_string(path).unwrap())
    };
    files(&files(to.path())[0]).iter().map(text).collect()
}

#[test]
fn a_pod_that_does_not_answer_is_given_up() {
    const SERVER: &str = " exec tunnel-server-a ";
    in_shells(|shell| {
        for (hangs, words, code, shown) in [
            (SERVER, &["test", "--all"][..], 2, "no answer for 3 s"),
            (SERVER, &["doctor"], 2, "14 ok"),
            (SERVER, &["status"], 1, "TABLE"),
            (SERVER, &["status"], 1, "tunnel-server-a does not answer"),
            (SERVER, &["version"], 1, "tunnel-server 0.2.0: 2"),
            (SERVER, &["bench", "edge-1"], 0, "no answer for 3 s"),
            (" exec tunnel-agent-x ", &["doctor", "edge-1"], 2, "no answer for 3 s"),
            (" exec ", &["agent", "list"], 1, "no answer for 3 s"),
            (
                SERVER,
                &["check"],
                2,
                "BROKEN   tunnel-server-a    doctor: kubectl postern: no answer for 3 s\nok       tunnel-server-b    doctor: 14 ok",
            ),
        ] {
            let bench = Bench::new(shell).with("hangs", hangs);
            let (ended, out, errors) = bench.run(&[words, &["--request-timeout=3s"]].concat());
            let said = format!("{out}{errors}");
            assert!(ended == code && said.contains(shown), "{shell:?} {words:?}: {ended} {said}");
        }
    });
}

#[test]
fn pods_are_asked_eight_at_a_time_and_heard_in_order() {
    let redirectors: Vec<_> = (10..30).map(|n| format!("tunnel-redirector-{n}")).collect();
    let mut expected = vec!["tunnel-server-a", "tunnel-server-b"];
    expected.extend(redirectors.iter().map(String::as_str));
    // The last one is being replaced.
    let servers = "tunnel-server-a\ntunnel-server-b\ntunnel-server-c 2026-01-01T00:00:00Z\n";
    in_shells(|shell| {
        let bench = Bench::new(shell).with("redirectors", &redirectors.join("\n"));
        let bench = bench.with("servers", servers).with("together", "8");
        let (code, out, errors) = bench.run(&["version"]);
        assert_eq!(code, 0, "{shell:?}: {out}{errors}");
        let answers = fs::read_to_string(bench.file("answers")).unwrap();
        assert_eq!(answers.split_whitespace().collect::<Vec<_>>(), expected, "{shell:?}");
        assert!(!bench.file("crowded").exists(), "{shell:?}: more than eight at the same time");
    });
}

#[test]
fn a_bundle_has_what_pods_give_and_why_others_give_nothing() {
    in_shells(|shell| {
        for (hangs, code, reason) in [
            ("nothing", 0, ""),
            (" exec tunnel-agent-x ", 1, "no answer for 3 s\n\ntunnel-agent-x ***\n"),
            (" logs tunnel-agent-x ", 1, "no answer for 3 s\n\n"),
        ] {
            let bench = Bench::new(shell).with("hangs", hangs);
            let archive = bench.file("a.tar.gz");
            let file = format!("--file={}", archive.display());
            let (ended, out, errors) = bench.run(&["bundle", &file, "--request-timeout=3s"]);
            let context = format!("{shell:?} {hangs}: {out}{errors}");
            assert!(ended == code && out.ends_with("a.tar.gz: 4 pods\n"), "{context}");
            assert_eq!(errors.contains("tunnel-agent-x gives no bundle"), code == 1, "{context}");
            let text = unpacked(&archive);
            for pod in ["redirector-a", "server-a", "server-b"] {
                let part = format!("==> tunnel-{pod}.tar.gz\ntunnel-{pod}\ntunnel-{pod} key-x\n");
                assert!(text.contains(&part), "{context}{text}");
            }
            assert_eq!(text.contains("==> tunnel-agent-x.tar.gz\n"), code == 0, "{context}{text}");
            assert!(text.contains(reason), "{context}{text}");
        }
    });
}

/// True while a process runs.
fn runs(process: &str) -> bool {
    let stat = fs::read_to_string(Path::new("/proc").join(process).join("stat")).unwrap_or_default();
    !stat.is_empty() && !stat.contains(") Z ")
}

#[test]
fn a_signal_ends_all_that_the_plugin_started() {
    in_shells(|shell| {
        // Of a terminal, which sends it to all processes, and of another program.
        for (signal, is_terminal) in [("-INT", true), ("-TERM", false)] {
            for (words, hanging, code) in [
                (&["test", "--all"][..], 2, 130),
                (&["status", "--watch"], 2, 0),
                (&["check"], 2, 130),
                (&["doctor", "edge-1"], 1, 130),
                (&["bundle", "--file=unfinished"], 2, 130),
            ] {
                let context = format!("{signal} {shell:?} {words:?}");
                let bench = Bench::new(shell).with("hangs", " exec ");
                let folder = bench.file("temporary");
                fs::create_dir(&folder).unwrap();
                let mut plugin = bench.command(words);
                plugin.env("TMPDIR", &folder).process_group(0).current_dir(bench.folder.path());
                let mut plugin = plugin.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
                let hang = || fs::read_to_string(bench.file("hanging")).unwrap_or_default();
                let wait = |what: &str, done: &mut dyn FnMut() -> bool| {
                    let deadline = Instant::now() + PATIENCE;
                    while !done() {
                        assert!(Instant::now() < deadline, "{context}: {what}");
                        std::thread::sleep(Duration::from_millis(10));
                    }
                };
                wait("its calls do not begin", &mut || hang().lines().count() == hanging);
                let to = format!("{}{}", if is_terminal { "-" } else { "" }, plugin.id());
                // Again each second: bash heeds no signal that comes as it begins to wait.
                let mut sent = None;
                let mut ended = || {
                    if sent.is_none_or(|at: Instant| at.elapsed() > Duration::from_secs(1)) {
                        run(program("kill").args([signal, "--", &to])).unwrap();
                        sent = Some(Instant::now());
                    }
                    plugin.try_wait().unwrap().is_some()
                };
                wait("it does not end", &mut ended);
                assert_eq!(plugin.wait().unwrap().code(), Some(code), "{context}");
                assert_eq!(fs::read_dir(&folder).unwrap().count(), 0, "{context}: temporary files are left");
                assert!(!bench.file("unfinished").exists(), "{context}");
                wait("kubectl is left", &mut || !hang().lines().any(runs));
            }
        }
    });
}

/// Returns a substitution with a `case`, as bash 3.2 reads it: up to the first parenthesis that none opened.
fn case_in_substitution(script: &str) -> Option<&str> {
    let texts = script.match_indices("$(").map(|(at, _)| {
        let mut depth = 0;
        let end = script[at..].find(|letter| {
            depth += i32::from(letter == '(') - i32::from(letter == ')');
            letter == ')' && depth == 0
        });
        &script[at + 2..at + end.unwrap_or(2)]
    });
    texts.into_iter().find(|text| text.split_whitespace().any(|word| word == "case"))
}

/// It is macOS' sh, and finds the end of a substitution before it knows `case`.
#[test]
fn bash_3_2_reads_the_script() {
    assert_eq!(case_in_substitution("x=$(case $y in a) b ;; esac)"), Some("case $y in a"));
    assert_eq!(case_in_substitution(&released_script().unwrap()), None);
}
