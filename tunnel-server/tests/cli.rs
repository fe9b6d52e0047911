//! The program's exit codes and output.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

fn run(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tunnel-server")).args(args).output().expect("the program starts")
}

fn code_and_error(args: &[&str]) -> (Option<i32>, String) {
    let output = run(args);
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn bad_configuration_is_64() {
    for (args, part) in [
        (&[][..], "tunnel-server: --kubeconfig: this is not a pod with a service account: "),
        (&["--kubeconfig=/nowhere"], "tunnel-server: --kubeconfig=/nowhere: "),
        (&["ca", "status", "--kubeconfig=/nowhere"], "tunnel-server: --kubeconfig=/nowhere: "),
        (
            &["--inventory=x", "--agent-port=70000"],
            "invalid value '70000' for '--agent-port <PORT>': not a port; ",
        ),
        (&["--no-such-flag"], "unexpected argument '--no-such-flag'"),
        (
            &["--inventory=/nonexistent/nodes.yaml", "--state-dir=/nowhere"],
            "--inventory=/nonexistent/nodes.yaml: ",
        ),
        (&["--inventory=x", "--agent-port"], "--agent-port"),
        (&["no-such-command"], "no-such-command"),
        (
            &["status", "--admin-address=192.0.2.1:1"],
            "invalid value '192.0.2.1:1' for '--admin-address <ADDRESS:PORT>': not a loopback address",
        ),
        (&["cleanup", "--redirect-range=x"], "invalid value 'x' for '--redirect-range <CIDR>': "),
    ] {
        let (code, error) = code_and_error(args);
        assert_eq!(code, Some(64), "{args:?}: {error}");
        assert!(error.contains(part), "{args:?}: {error}");
    }
}

#[test]
fn a_bad_value_is_named_with_its_flag() {
    for (flag, value) in [
        ("--redirect-ports", "10250,x"),
        ("--redirect-ports", "0"),
        ("--exclude", "10.0.0.0/33"),
        ("--redirect-range", "198.18.0.0/40"),
        ("--redirect-clients", "everybody"),
        ("--drain-timeout", "soon"),
        ("--log-level", "loud"),
        ("--log-format", "xml"),
        ("--bind-address", "nowhere"),
        ("--edge-selector", "a in"),
        ("--redirect", "maybe"),
    ] {
        let (code, error) = code_and_error(&["--inventory=x", &format!("{flag}={value}")]);
        assert_eq!(code, Some(64), "{flag}={value}: {error}");
        assert!(error.contains(flag) && error.contains(value), "{flag}={value}: {error}");
    }
}

#[test]
fn the_ca_of_a_directory_needs_no_cluster() {
    let (code, error) = code_and_error(&["ca", "status", "--state-dir=/nowhere"]);
    assert_eq!(code, Some(1), "{error}");
    assert!(error.contains("/nowhere/ca: there is no CA"), "{error}");
}

#[test]
fn a_failure_while_running_is_1() {
    // A port that was free a moment ago, where nothing listens.
    let free = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("its address");
    let (code, error) = code_and_error(&["status", &format!("--admin-address={free}")]);
    assert_eq!(code, Some(1), "{error}");
    assert_eq!(
        error,
        format!(
            "tunnel-server: --admin-address={free}: Connection refused (os error 111); is it running, and with this \
             --admin-address?\n"
        )
    );
}

#[test]
fn secrets_are_taken_out_of_any_text() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_tunnel-server"))
        .arg("redact")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let mut input = child.stdin.take().expect("piped");
    input.write_all(b"started with --token=s3cret\nup\n").expect("it reads");
    drop(input);
    let output = child.wait_with_output().expect("it ends");
    assert!(output.status.success(), "{}", output.status);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "started with --token=***\nup\n");
}

#[test]
fn watch_survives_a_failed_request_and_ends_on_ctrl_c() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let admin = format!("--admin-address={}", listener.local_addr().expect("its address"));
    let mut child = Command::new(env!("CARGO_BIN_EXE_tunnel-server"))
        .args(["status", "--watch", &admin])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let mut errors = BufReader::new(child.stderr.take().expect("it is piped"));
    drop(listener.accept().expect("the first request"));
    let mut error = String::new();
    errors.read_line(&mut error).expect("an error");
    assert!(error.starts_with(&format!("tunnel-server: {admin}: ")), "{error}");
    // Never answered: if the command waited for its own deadline, it would print another error.
    let hung = listener.accept().expect("the second request");
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &pid]).status().expect("kill").success());
    let mut rest = String::new();
    errors.read_to_string(&mut rest).expect("the end");
    assert_eq!(rest, "");
    assert_eq!(child.wait().expect("its end").code(), Some(0));
    drop(hung);
}

#[test]
fn help_and_version_are_0_and_on_standard_output() {
    let help = run(&["--help"]);
    assert_eq!(help.status.code(), Some(0));
    let text = String::from_utf8_lossy(&help.stdout);
    let defaults = ["[default: 10262]", "10263", "198.18.0.0/15", "127.0.0.1:10265", "30s"];
    for part in ["--inventory <FILE>", "status", "cleanup", "token"].into_iter().chain(defaults) {
        assert!(text.contains(part), "{part}\n{text}");
    }
    for hidden in ["meta-port", "tunnel-agent-connect-port", "kube-config"] {
        assert!(!text.contains(hidden), "{hidden}");
    }
    assert_eq!(run(&["--version"]).status.code(), Some(0));
}

/// Runs a shell's command line on a terminal, and returns what that shows.
fn on_terminal(line: &str) -> String {
    let mut script = Command::new("script");
    script.args(["--quiet", "--command", line, "/dev/null"]).stdin(Stdio::null());
    // Nothing of the environment in which the test runs: CI, CLICOLOR and others decide about colours, and SHELL runs `line`.
    let path = std::env::var_os("PATH").expect("PATH");
    script.env_clear().env("PATH", path).env("SHELL", "/bin/sh").env("TERM", "xterm");
    script.env("PROGRAM", env!("CARGO_BIN_EXE_tunnel-server"));
    let output = script.output().expect("util-linux's script starts");
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn colours_are_for_a_terminal() {
    const DOCTOR: &str =
        "\"$PROGRAM\" doctor --admin-address=0 --inventory=/nowhere --redirect=off --state-dir=/nowhere";
    let red = "\u{1b}[31mBROKEN  \u{1b}[0m ";
    for (line, coloured) in [
        (DOCTOR.to_owned(), true),
        (format!("NO_COLOR=1 {DOCTOR}"), false),
        (format!("TERM=dumb {DOCTOR}"), false),
        (format!("{DOCTOR} | cat"), false),
        (format!("CLICOLOR_FORCE=1 {DOCTOR} | cat"), true),
        (format!("CLICOLOR_FORCE=1 {DOCTOR} --output=yaml"), false),
    ] {
        let shown = on_terminal(&line);
        assert!(shown.contains("BROKEN  ") || shown.contains("state: broken"), "{line}: {shown:?}");
        let found = (shown.contains(red), shown.contains('\u{1b}'));
        assert_eq!(found, (coloured, coloured), "{line}: {shown:?}");
    }
}

#[test]
fn a_terminal_shows_what_a_slow_command_waits_for() {
    // Accepts nothing, so that the command waits for its deadline.
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("its address");
    let status = format!("\"$PROGRAM\" status --admin-address={address} 2>&1");
    let [shown, piped] = std::thread::scope(|scope| {
        let lines = [status.clone(), format!("{status} | cat")];
        lines.map(|line| scope.spawn(move || on_terminal(&line))).map(|shown| shown.join().expect("it ends"))
    });
    assert!(shown.contains(&format!("\r\u{1b}[Kstatus: asking {address} … (2 s)")), "{shown:?}");
    let (_, error) = shown.rsplit_once("\r\u{1b}[K").expect("it is erased");
    assert!(error.starts_with("tunnel-server: --admin-address="), "{shown:?}");
    assert!(piped.starts_with("tunnel-server: --admin-address=") && piped.lines().count() == 1, "{piped}");
}

#[test]
fn documents_are_the_same_as_json_and_yaml() {
    let directory = tempfile::tempdir().expect("a directory");
    let command = |args: &[&str]| {
        let state_dir = format!("--state-dir={}", directory.path().join("server").display());
        let output = run(&[args, &[&state_dir]].concat());
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("text")
    };
    command(&["token", "create", "--node=1e5"]);
    for list in [&["token", "list"][..], &["ca", "status"], &["agent", "list"]] {
        let json: Value = serde_json::from_str(&command(&[list, &["-o", "json"]].concat())).expect("JSON");
        let yaml: Value = serde_saphyr::from_str(&command(&[list, &["-o", "yaml"]].concat())).expect("YAML");
        assert_eq!(json, yaml, "{list:?}");
    }
}

#[test]
fn only_the_status_has_a_wide_form() {
    for args in
        [&["token", "list"][..], &["doctor"], &["test", "edge-1"], &["bench", "edge-1"], &["ca", "status"]]
    {
        let (code, error) = code_and_error(&[args, &["-o", "wide"]].concat());
        assert_eq!(code, Some(64), "{args:?}: {error}");
        assert!(error.contains("[possible values: text, json, yaml]"), "{args:?}: {error}");
    }
    let (code, error) = code_and_error(&["status", "--connections", "-o", "wide"]);
    assert_eq!((code, error.contains("--output=wide: ")), (Some(64), true), "{error}");
    let (code, error) = code_and_error(&["status", "-o", "xml"]);
    assert_eq!(
        (code, error.contains("[possible values: text, wide, json, yaml]")),
        (Some(64), true),
        "{error}"
    );
}

#[test]
fn completion_ends_without_a_word_when_its_reader_does() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_tunnel-server"))
        .args(["completion", "zsh"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("it ends");
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
}
