//! Headless Chromium, controlled over its DevTools protocol on two pipes
//! (<https://chromedevtools.github.io/devtools-protocol/>).
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use postern_testbed::Testbed;
use postern_testbed::process::Process;
use postern_testbed::wait::wait_until;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::unix::pipe;

const PATIENCE: Duration = Duration::from_secs(30);

/// A browser with one page.
pub(super) struct Browser {
    _process: Process,
    commands: pipe::Sender,
    answers: BufReader<pipe::Receiver>,
    session: Option<String>,
    last: u64,
    /// Exceptions of scripts, and violations of the page's security policy.
    pub(super) faults: Vec<String>,
}

impl Browser {
    /// Starts a browser on the cloud host.
    pub(super) async fn start(testbed: &Testbed) -> Result<Self> {
        static STARTED: AtomicU32 = AtomicU32::new(0);
        let name = format!("chromium-{}", STARTED.fetch_add(1, Ordering::Relaxed));
        let dir = testbed.dir().join(&name);
        fs::create_dir_all(&dir)?;
        let (commands, answers) = (dir.join("commands"), dir.join("answers"));
        for path in [&commands, &answers] {
            mkfifo(path, Mode::S_IRWXU).with_context(|| format!("making {}", path.display()))?;
        }
        // Opened for reading and writing, so that no open waits for the other program.
        let mut open = pipe::OpenOptions::new();
        open.read_write(true);
        let (sender, receiver) = (open.open_sender(&commands)?, open.open_receiver(&answers)?);
        let mut command = testbed.on_cloud().command(Path::new("sh"));
        command
            .args(["-c", r#"in="$1" out="$2"; shift 2; exec "$@" 3<"$in" 4>"$out""#, "sh"])
            .args([&commands, &answers])
            .arg("chromium")
            // It runs as root, without a screen and without Internet access.
            .args([
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--hide-scrollbars",
            ])
            .args(["--no-first-run", "--disable-background-networking", "--disable-component-update"])
            .args(["--remote-debugging-pipe", "--window-size=1280,1000", "--lang=en"])
            .arg(format!("--user-data-dir={}", dir.join("profile").display()))
            .env("HOME", &dir)
            .env("LC_ALL", "C.UTF-8");
        let process = Process::spawn(testbed.dir(), &name, command)?;
        let mut browser = Self {
            _process: process,
            commands: sender,
            answers: BufReader::new(receiver),
            session: None,
            last: 0,
            faults: Vec::new(),
        };
        let target = browser.command("Target.createTarget", json!({"url": "about:blank"})).await?;
        let attach = json!({"targetId": target["targetId"], "flatten": true});
        let attached = browser.command("Target.attachToTarget", attach).await?;
        browser.session = Some(attached["sessionId"].as_str().context("no session")?.to_owned());
        for domain in ["Page.enable", "Runtime.enable", "Log.enable"] {
            browser.command(domain, json!({})).await?;
        }
        Ok(browser)
    }

    async fn command(&mut self, method: &str, params: Value) -> Result<Value> {
        self.last += 1;
        let mut message = json!({"id": self.last, "method": method, "params": params});
        if let Some(session) = &self.session {
            message["sessionId"] = json!(session);
        }
        let mut bytes = serde_json::to_vec(&message)?;
        bytes.push(0);
        let exchange = async {
            self.commands.write_all(&bytes).await?;
            loop {
                let mut answer = Vec::new();
                self.answers.read_until(0, &mut answer).await?;
                ensure!(answer.pop() == Some(0), "the browser has ended");
                let answer: Value = serde_json::from_slice(&answer)?;
                if answer["id"] == self.last {
                    return Ok(answer);
                }
                let told = match answer["method"].as_str() {
                    Some("Runtime.exceptionThrown") => Some(&answer["params"]["exceptionDetails"]),
                    Some("Log.entryAdded") if answer["params"]["entry"]["level"] == "error" => {
                        Some(&answer["params"]["entry"])
                    }
                    _ => None,
                };
                self.faults.extend(told.map(ToString::to_string));
            }
        };
        let answer = tokio::time::timeout(PATIENCE, exchange).await;
        let answer = answer.with_context(|| format!("no answer of the browser to {method}"))??;
        if let Some(error) = answer.get("error") {
            bail!("{method}: {error}");
        }
        Ok(answer["result"].clone())
    }

    pub(super) async fn open(&mut self, url: &str) -> Result<()> {
        let opened = self.command("Page.navigate", json!({"url": url})).await?;
        ensure!(opened.get("errorText").is_none(), "{url}: {opened}");
        Ok(())
    }

    /// Evaluates an expression, and awaits it if it is a promise.
    pub(super) async fn value(&mut self, expression: &str) -> Result<Value> {
        let params = json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        let answer = self.command("Runtime.evaluate", params).await?;
        ensure!(answer.get("exceptionDetails").is_none(), "{expression}: {answer}");
        Ok(answer["result"]["value"].clone())
    }

    /// Returns the visible text of the first element that matches a selector.
    pub(super) async fn text(&mut self, selector: &str) -> Result<String> {
        let text = self.value(&format!("document.querySelector({selector:?})?.innerText ?? ''")).await?;
        Ok(text.as_str().unwrap_or_default().to_owned())
    }

    /// Waits until the element's text contains `part`.
    pub(super) async fn shows(&mut self, selector: &str, part: &str) -> Result<()> {
        let what = format!("{part:?} in {selector}");
        wait_until(&what, PATIENCE, async || self.text(selector).await, |text| text.contains(part))
            .await
            .map(drop)
    }

    /// Waits until an expression is true.
    pub(super) async fn until(&mut self, expression: &str) -> Result<()> {
        let seen = async || self.value(expression).await;
        wait_until(expression, PATIENCE, seen, |value| *value == true).await.map(drop)
    }

    /// Presses a key, named as in `KeyboardEvent.key`.
    pub(super) async fn press(&mut self, key: &str) -> Result<()> {
        let (code, text) = match key {
            "Enter" => (13, "\r"),
            "Escape" => (27, ""),
            "Tab" => (9, ""),
            "End" => (35, ""),
            "Home" => (36, ""),
            "ArrowUp" => (38, ""),
            "ArrowDown" => (40, ""),
            _ => (0, key),
        };
        for kind in ["keyDown", "keyUp"] {
            let kind = if kind == "keyDown" && text.is_empty() { "rawKeyDown" } else { kind };
            let mut params = json!({"type": kind, "key": key, "windowsVirtualKeyCode": code});
            if kind == "keyDown" {
                params["text"] = json!(text);
            }
            self.command("Input.dispatchKeyEvent", params).await?;
        }
        Ok(())
    }

    /// Types into the focused element.
    pub(super) async fn write(&mut self, text: &str) -> Result<()> {
        self.command("Input.insertText", json!({"text": text})).await.map(drop)
    }

    pub(super) async fn click(&mut self, selector: &str) -> Result<()> {
        let place = format!(
            "(() => {{ const e = document.querySelector({selector:?}); e.scrollIntoView({{block: 'center'}}); \
             const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; }})()"
        );
        let place = self.value(&place).await?;
        for kind in ["mousePressed", "mouseReleased"] {
            let params =
                json!({"type": kind, "x": place[0], "y": place[1], "button": "left", "clickCount": 1});
            self.command("Input.dispatchMouseEvent", params).await?;
        }
        Ok(())
    }

    /// Sets the width of the screen, in CSS pixels.
    pub(super) async fn width(&mut self, width: u32) -> Result<()> {
        let size = json!({"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": width < 500});
        self.command("Emulation.setDeviceMetricsOverride", size).await.map(drop)
    }

    /// Sets the preferred colour scheme.
    pub(super) async fn dark(&mut self, dark: bool) -> Result<()> {
        let value = if dark { "dark" } else { "light" };
        let feature = json!({"name": "prefers-color-scheme", "value": value});
        self.command("Emulation.setEmulatedMedia", json!({"features": [feature]})).await.map(drop)
    }

    /// Returns a screenshot of the whole page as PNG.
    pub(super) async fn picture(&mut self) -> Result<Vec<u8>> {
        let size = "({x: 0, y: 0, scale: 1, width: document.documentElement.clientWidth, \
            height: document.documentElement.scrollHeight})";
        let clip = self.value(size).await?;
        let params = json!({"format": "png", "captureBeyondViewport": true, "clip": clip});
        let answer = self.command("Page.captureScreenshot", params).await?;
        let data = answer["data"].as_str().context("no picture")?;
        Ok(STANDARD.decode(data)?)
    }
}
