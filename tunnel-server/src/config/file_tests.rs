//! Flags in the file of `--config`.

use super::tests::{config, parsed, parsed_again};

#[test]
fn a_file_has_flags_too() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("server.yaml");
    let with = |text: &str, args: &[&str]| {
        std::fs::write(&path, text).unwrap();
        let file = format!("--config={}", path.display());
        config(&[args, &[&file]].concat())
    };
    let text = "agent-port: 7\nredirect: false\ngateway: off\nbpffs: off\nexclude: [10.0.0.0/8, 'fd00::1']\n\
                edge-pod-routes: off\nlog-level: debug\nmap:\n\
                - 127.0.0.1:1=a/22\n- 127.0.0.1:2=b/22\n";
    let of_file = with(text, &[]).unwrap();
    assert_eq!((of_file.listeners.agents.port, of_file.redirects), (Some(7), false));
    assert_eq!((of_file.redirect.exclude.len(), of_file.listeners.connect.maps.len()), (2, 2));
    assert!(of_file.flags.contains(&"--agent-port=7".to_owned()), "{:?}", of_file.flags);
    assert_eq!(format!("{:?}", parsed_again(&of_file)), format!("{of_file:?}"));
    // The command line takes precedence, also for lists.
    let both = with(text, &["--agent-port=8", "--map=127.0.0.1:3=c/22", "--redirect"]).unwrap();
    assert_eq!(
        (both.listeners.agents.port, both.redirects, both.listeners.connect.maps.len()),
        (Some(8), true, 1)
    );
    assert_eq!(both.log.log_level, "debug".parse().unwrap());
    assert!(with("", &[]).is_ok() && with("# nothing\n", &[]).is_ok());
    for (text, parts) in [
        ("agent-port: 7\nagnet-port: 8\n", &["line 2: \"agnet-port\" is no flag of tunnel-server"][..]),
        ("config: /x\n", &["\"config\" is no flag"]),
        ("agent-port: 70000\n", &["'70000'", "--agent-port", "not a port"]),
        ("state-dir: {a: 1}\n", &["line 1: state-dir: neither text, a whole number"]),
        ("redirect: on\negress-socket-mode: 0660\n", &["line 2: egress-socket-mode: ", "quotes"]),
        ("agent-port:\n", &["agent-port: ", "neither text"]),
        ("agent-port: 7\nagent-port: 8\n", &["line 2: ", "duplicate mapping key: agent-port\n"]),
        ("agent-port: [\n", &["line"]),
        ("kubeconfig: /k\n", &["--kubeconfig", "cannot be used with", "--inventory"]),
    ] {
        let error = with(text, &[]).unwrap_err();
        assert!(error.starts_with("error: --config=/"), "{text}: {error}");
        parts.iter().for_each(|part| assert!(error.contains(part), "{text}: {error} lacks {part}"));
    }
    assert!(config(&["--config=/no/such"]).unwrap_err().contains("--config=/no/such: No such file"));
    let redirector = |text: &str| {
        std::fs::write(&path, text).unwrap();
        parsed(&["redirector", &format!("--config={}", path.display())])
    };
    let error = redirector("agent-port: 7\n").unwrap_err();
    assert!(error.contains("\"agent-port\" is no flag of redirector"), "{error}");
    let found = redirector("node-name: cloud-2\nservice: s\n").unwrap();
    assert_eq!(found.redirector.unwrap().node.as_str(), "cloud-2");
}
