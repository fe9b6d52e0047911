use std::os::unix::fs::PermissionsExt as _;

use super::*;

const SERVICE: Service = Service {
    name: "agent",
    unit: "[Service]\n",
    environment: "# flags\nHTTPS_PROXY=http://p\nPOSTERN_AGENT_FLAGS=--server cloud.example.org:10262\n",
};

/// Calls `test` with a host whose systemctl writes down its arguments, and lists the units that `running` names.
fn on_host(running: &str, test: impl FnOnce(&Host<'_>, &dyn Fn() -> Vec<String>)) {
    let dir = tempfile::tempdir().unwrap();
    let systemctl = dir.path().join("systemctl");
    let (log, listed) = (dir.path().join("log"), dir.path().join("running"));
    fs::write(&listed, running).unwrap();
    let script = format!(
        "#!/bin/sh\ncase $1 in list-units) cat {};; show) echo MainPID=7;; is-enabled) test $3 = postern-agent@a.service;; *) echo \"$@\" >> {};; esac\n",
        listed.display(),
        log.display()
    );
    let source = dir.path().join("systemctl.source");
    fs::write(&source, script).unwrap();
    // Another test's child may have inherited a file that this process writes, which is then busy for execve(2).
    let installed = Command::new("install").arg("--mode=755").args([&source, &systemctl]).status();
    assert!(installed.unwrap().success());
    fs::create_dir_all(dir.path().join(OWN_UNITS)).unwrap();
    let stays = Duration::from_millis(50);
    let host = Host { root: dir.path().to_owned(), systemctl, service: &SERVICE, stays };
    let calls = || {
        let text = fs::read_to_string(&log).unwrap_or_default();
        fs::remove_file(&log).ok();
        text.lines().map(str::to_owned).collect()
    };
    test(&host, &calls);
}

#[test]
fn it_is_installed_once_and_again() {
    on_host("", |host, calls| {
        host.install(&["--server", "a:1", "--token", "id.secret", "--node-name=n"]).unwrap();
        let read = |path: &str| {
            let path = host.path(path);
            let mode = fs::metadata(&path).unwrap().permissions().mode() & 0o777;
            (fs::read_to_string(path).unwrap(), mode)
        };
        assert_eq!(read(TOKEN), ("id.secret\n".to_owned(), 0o600));
        let flags = "# flags\nHTTPS_PROXY=http://p\nPOSTERN_AGENT_FLAGS=--server a:1 --token-file=/etc/postern/token --node-name=n\n";
        assert_eq!(read("/etc/postern/agent.env"), (flags.to_owned(), 0o600));
        let unit = "/etc/systemd/system/postern-agent@.service";
        assert_eq!(read(unit), (format!("{WRITTEN}[Service]\n"), 0o644));
        let started = [
            "daemon-reload",
            "restart postern-agent@a.service",
            "disable --quiet postern-agent@.service",
            "enable --quiet postern-agent@a.service",
        ];
        assert_eq!(calls(), started);

        // With it running, another instance takes over. A unit that is there stays, such as a package's.
        fs::write(host.root.join("running"), "postern-agent@a.service loaded active running x\n").unwrap();
        fs::write(host.path(unit), format!("{WRITTEN}older\n")).unwrap();
        host.upgrade().unwrap();
        assert_eq!(read(unit).0, format!("{WRITTEN}[Service]\n"));
        fs::write(host.path(unit), "edited\n").unwrap();
        host.install(&["--server=b:1"]).unwrap();
        assert_eq!(read("/etc/postern/agent.env.before"), (flags.to_owned(), 0o600));
        assert!(calls().contains(&"restart postern-agent@b.service".to_owned()));
        assert!(read("/etc/postern/agent.env").0.ends_with("FLAGS=--server=b:1\n"));
        host.uninstall().unwrap();
        assert_eq!(read(unit).0, "edited\n");
    });
}

#[test]
fn an_upgrade_starts_nothing_that_was_stopped_and_enables_nothing_that_was_not() {
    on_host("", |host, calls| {
        host.upgrade().unwrap();
        assert_eq!(calls(), [""; 0]);
    });
    let both =
        "postern-agent@a.service loaded active running x\npostern-agent@b.service loaded active running x\n";
    on_host(both, |host, calls| {
        host.upgrade().unwrap();
        let calls = calls();
        assert_eq!(calls[1], "restart postern-agent@c.service");
        assert_eq!(calls[3], "enable --quiet postern-agent@c.service");
    });
    on_host("postern-agent@b.service loaded active running x\n", |host, calls| {
        host.upgrade().unwrap();
        assert_eq!(calls(), ["daemon-reload", "restart postern-agent@a.service"]);
    });
}

#[test]
fn a_successor_that_ends_at_once_replaces_nothing() {
    on_host("postern-agent@a.service loaded active running x\n", |host, calls| {
        let script = fs::read_to_string(&host.systemctl).unwrap();
        // Another process each time.
        fs::write(&host.systemctl, script.replace("echo MainPID=7", "echo MainPID=$$")).unwrap();
        let error = host.upgrade().unwrap_err().to_string();
        assert!(
            error.starts_with("postern-agent@b.service ends soon") && error.contains("not replaced"),
            "{error}"
        );
        assert_eq!(
            calls(),
            ["daemon-reload", "restart postern-agent@b.service", "stop postern-agent@b.service"]
        );
    });
}

#[test]
fn what_was_written_is_removed() {
    on_host("", |host, calls| {
        host.install(&["--server=a:1"]).unwrap();
        calls();
        host.uninstall().unwrap();
        assert!(!host.path("/etc/systemd/system/postern-agent@.service").exists());
        assert_eq!(
            calls(),
            [
                "stop postern-agent@*.service",
                "disable --quiet postern-agent@.service",
                "reset-failed postern-agent@*.service",
                "daemon-reload"
            ]
        );
        // A second time, and where it never was.
        host.uninstall().unwrap();
        assert_eq!(calls().len(), 2);
    });
}

#[test]
fn systemd_has_to_find_this_program() {
    on_host("", |host, _| {
        let (here, folder) = (host.root.join("tunnel-agent"), host.path("usr/local/bin"));
        fs::write(&here, "").unwrap();
        let error = host.finds(&here).unwrap_err().to_string();
        assert!(error.contains("not find tunnel-agent") && error.contains("install -m 755 /"), "{error}");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("tunnel-agent"), "another").unwrap();
        assert!(host.finds(&here).unwrap_err().to_string().contains("not this program"));
        host.finds(&fs::canonicalize(folder.join("tunnel-agent")).unwrap()).unwrap();
    });
}

#[test]
fn flags_that_systemd_would_change_are_refused() {
    for flag in ["--a=b c", "--a=$B", "--a='b'", "--a=\"", "--a=\\", "--a=b\nC=d", ""] {
        let error = split(&[flag]).unwrap_err().to_string();
        let key = if flag.is_empty() { "service install" } else { "--a" };
        assert!(error.starts_with(&format!("{key}: blanks")) && error.contains("--config"), "{error}");
    }
    let error = split(&["--proxy=http://u:secret@p:3128"]).unwrap_err().to_string();
    assert!(error.starts_with("--proxy: everyone") && !error.contains("secret"), "{error}");
    let error = with_flags("A=b \\\nc\n", "F=", &[]).unwrap_err().to_string();
    assert!(error.starts_with("A: the line ends with \\"), "{error}");
    let (token, rest) = split(&["--token= a.b "]).unwrap();
    assert_eq!((token.as_deref(), rest.len()), (Some("a.b"), 1));
}

#[test]
fn a_systemctl_that_fails_is_named_with_what_it_said() {
    on_host("", |host, _| {
        fs::write(&host.systemctl, "#!/bin/sh\necho masked >&2; exit 1\n").unwrap();
        let error = host.upgrade().unwrap_err().to_string();
        assert!(
            error.starts_with("`systemctl list-units ") && error.ends_with("exit status: 1, masked"),
            "{error}"
        );
    });
}
