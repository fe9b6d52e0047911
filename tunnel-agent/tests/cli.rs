//! Exit codes and error messages of the program itself.

use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::process::{Command, Output, Stdio};

fn run(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tunnel-agent"))
        .env_remove("NODE_NAME")
        .env_remove("NODE_IP")
        .env_remove("KUBERNETES_SERVICE_HOST")
        .args(args)
        .output()
        .expect("the program starts")
}

#[test]
fn bad_configuration_exits_with_64() {
    for (args, part) in [
        (&[][..], "tunnel-agent: --server: needed: "),
        (&["--kubeconfig=/no/such/file"], "tunnel-agent: --kubeconfig=/no/such/file: "),
        (
            &["--server=a:1", "--allow-target=x"],
            "invalid value 'x' for '--allow-target <CIDR:PORTS>': not CIDR:PORTS; ",
        ),
        (&["--no-such-flag"], "unexpected argument '--no-such-flag'"),
        (&["--server=a:1", "--node-name=Edge_1"], "invalid value 'Edge_1' for '--node-name <NAME>': "),
        (&["status", "-o", "wide"], "[possible values: text, json, yaml]"),
        (
            &["status", "--admin-address=192.0.2.1:1"],
            "invalid value '192.0.2.1:1' for '--admin-address <ADDRESS:PORT>': not a loopback address",
        ),
    ] {
        let output = run(args);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(64), "{args:?}: {error}");
        assert!(error.contains(part), "{args:?}: {error}");
    }
}

#[test]
fn a_bad_value_is_named_with_its_flag() {
    for (flag, value) in [
        ("--server", "10.70.0.1"),
        ("--ca-hash", "md5:00"),
        ("--allow-target", "here"),
        ("--node-ip", "nowhere"),
        ("--admin-address", "1234567"),
    ] {
        let output = run(&["--server=a:1", "--node-name=edge-1", &format!("{flag}={value}")]);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(64), "{flag}={value}: {error}");
        assert!(error.contains(flag) && error.contains(value), "{flag}={value}: {error}");
    }
}

#[test]
fn the_environment_names_the_node() {
    let output = Command::new(env!("CARGO_BIN_EXE_tunnel-agent"))
        .env("NODE_NAME", "Edge_1")
        .arg("--server=a:1")
        .output()
        .expect("the program starts");
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(64), "{error}");
    assert!(error.contains("invalid value 'Edge_1' for '--node-name <NAME>': "), "{error}");
}

#[test]
fn failures_while_running_exit_with_1() {
    let free = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("its address");
    let output = run(&["status", &format!("--admin-address={free}")]);
    assert_eq!(output.status.code(), Some(1));
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains("Connection refused") && error.contains("--admin-address"), "{error}");
}

#[test]
fn a_watch_survives_a_failed_request_and_ends_immediately_on_ctrl_c() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let admin = format!("--admin-address={}", listener.local_addr().expect("its address"));
    let mut child = Command::new(env!("CARGO_BIN_EXE_tunnel-agent"))
        .args(["status", "--watch", &admin])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let mut errors = BufReader::new(child.stderr.take().expect("it is piped"));
    drop(listener.accept().expect("the first request"));
    let mut error = String::new();
    errors.read_line(&mut error).expect("an error");
    assert!(error.starts_with(&format!("tunnel-agent: {admin}: ")), "{error}");
    // Never answered, so this request hangs until its own deadline, whose error would be printed.
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
fn help_and_version_exit_with_0() {
    let help = run(&["--help"]);
    assert_eq!(help.status.code(), Some(0));
    let text = String::from_utf8_lossy(&help.stdout);
    for part in ["--server", "--token-file", "127.0.0.1:10266", "/var/lib/postern/agent", "--allow-target"] {
        assert!(text.contains(part), "{part}\n{text}");
    }
    assert_eq!(run(&["--version"]).status.code(), Some(0));
}
