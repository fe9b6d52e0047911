//! Logging: text or JSON on standard error, with a level that can be changed at run time. A dedicated thread writes,
//! so that no other thread waits for standard error.

use std::fmt;
use std::io::IsTerminal;
use std::str::FromStr;
use std::sync::Arc;

use clap::{Args, ValueEnum};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, Registry, fmt as fmt_layer, reload};

use crate::log_queue;
pub use crate::log_queue::{LogGuard, LostLines};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    Text,
    Json,
}

/// The flags of the log.
#[derive(Args, Clone, Copy, Debug)]
pub struct LogConfig {
    /// text or json, one line per event on standard error; with json, an object with the event's fields at the top level.
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    pub log_format: Format,
    /// off, error, warn, info, debug, trace, or klog's number.
    #[arg(long, value_name = "LEVEL", alias = "v", short_alias = 'v', default_value = "info")]
    pub log_level: Level,
}

/// Verbosity: a name, or klog's number (0 to 3 info, 4 and 5 debug, 6 to 9 trace, from 10 on also the libraries'
/// trace).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Level {
    own: LevelFilter,
    /// True for the libraries' trace too, which at the other levels log only warnings and errors.
    everything: bool,
}

impl Level {
    fn filter(self) -> Targets {
        let Self { own, everything } = self;
        let libraries = if everything { own } else { own.min(LevelFilter::WARN) };
        // Targets are module paths: "tunnel" covers tunnel_runtime, tunnel_server and tunnel_agent.
        let targets =
            Targets::new().with_default(libraries).with_target("tunnel", own).with_target("postern", own);
        if everything {
            return targets;
        }
        // The Kubernetes client logs each failed request as an error; our own code logs it once, with its effect. It warns of each
        // watch that is cut, which is resumed, and with the whole body, maybe a Secret, of an answer that it cannot parse.
        targets
            .with_target("kube_client::client", own.min(LevelFilter::ERROR))
            .with_target("kube_client::client::tls", libraries)
            .with_target("kube_client::client::builder", LevelFilter::OFF)
    }
}

impl FromStr for Level {
    type Err = LoggingError;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        let number = s.parse::<u32>().ok();
        let own = match number {
            Some(0..=3) => LevelFilter::INFO,
            Some(4 | 5) => LevelFilter::DEBUG,
            Some(_) => LevelFilter::TRACE,
            None if s.eq_ignore_ascii_case("warning") => LevelFilter::WARN,
            // A level for the library.
            None if s.is_empty() => return Err(LoggingError::Level),
            None => s.parse().map_err(|_| LoggingError::Level)?,
        };
        Ok(Self { own, everything: number.is_some_and(|number| number >= 10) })
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.everything { f.write_str("10") } else { self.own.fmt(f) }
    }
}

/// A level, and levels for single modules: `info,tunnel_server::listener=debug`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filter {
    level: Level,
    /// Module paths, also of libraries, with their levels.
    modules: Vec<(String, Level)>,
}

impl Filter {
    fn targets(&self) -> Targets {
        let modules = self.modules.iter().map(|(module, level)| (module.clone(), level.own));
        self.level.filter().with_targets(modules)
    }
}

impl From<Level> for Filter {
    fn from(level: Level) -> Self {
        Self { level, modules: Vec::new() }
    }
}

impl FromStr for Filter {
    type Err = LoggingError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut parts = text.split(',').map(str::trim);
        let level = parts.next().unwrap_or_default().parse()?;
        let modules = parts.map(|part| {
            let (module, level) = part.split_once('=').ok_or(LoggingError::Module)?;
            let word = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b':');
            if module.is_empty() || !module.bytes().all(word) {
                return Err(LoggingError::Module);
            }
            Ok((module.to_owned(), level.parse()?))
        });
        Ok(Self { level, modules: modules.collect::<Result<_, _>>()? })
    }
}

/// Reason for failing to set up or change logging.
#[derive(Debug, thiserror::Error)]
pub enum LoggingError {
    #[error("not a log level; use off, error, warn, info, debug, trace, or klog's number")]
    Level,
    #[error("not a level and then MODULE=LEVEL, such as info,tunnel_server::listener=debug")]
    Module,
    #[error("this process has a logger already")]
    Installed,
    #[error("the logger is gone")]
    Gone,
}

type Apply = dyn Fn(Targets) -> Result<(), LoggingError> + Send + Sync;

/// Changes the log level of the running process. Clones share it.
#[derive(Clone)]
pub struct Handle {
    apply: Arc<Apply>,
    lost: LostLines,
}

impl Handle {
    /// Creates a handle without a logger, for tests and one-shot commands.
    pub fn detached() -> Self {
        Self { apply: Arc::new(|_| Ok(())), lost: LostLines::default() }
    }

    /// Returns the counters of lines that were not written.
    pub fn lost(&self) -> &LostLines {
        &self.lost
    }

    /// Waits until all lines that were logged are written or lost.
    pub(crate) async fn written(self) {
        self.lost.written().await;
    }

    /// Sets the filter. It takes effect immediately, for every thread.
    ///
    /// # Errors
    /// Fails if the process no longer has the logger of this handle.
    pub fn set(&self, filter: &Filter) -> Result<(), LoggingError> {
        (self.apply)(filter.targets())
    }
}

/// Installs the process's logger, on standard error; it logs panics too. Drop the guard last: it writes the lines that
/// still wait.
///
/// # Errors
/// Fails if the process already has a logger.
pub fn init(config: LogConfig) -> Result<(Handle, LogGuard), LoggingError> {
    let (queue, guard, lost) = log_queue::start(std::io::stderr());
    let (layer, handle) =
        layered(config.log_format, config.log_level, queue, std::io::stderr().is_terminal());
    tracing_subscriber::registry().with(layer).try_init().map_err(|_| LoggingError::Installed)?;
    // The default hook would write to standard error itself, from the thread that panicked.
    std::panic::set_hook(Box::new(|panic| {
        let backtrace = std::backtrace::Backtrace::capture();
        let captured = backtrace.status() == std::backtrace::BacktraceStatus::Captured;
        let backtrace = captured.then(|| tracing::field::display(&backtrace));
        tracing::error!(%panic, backtrace, "thread panicked");
    }));
    Ok((Handle { lost, ..handle }, guard))
}

/// Creates the layer that [`init`] installs. Separate, so that a test can have its own writer and scope.
fn layered<W>(format: Format, level: Level, writer: W, colour: bool) -> (impl Layer<Registry>, Handle)
where
    W: for<'a> fmt_layer::MakeWriter<'a> + Send + Sync + 'static,
{
    let (filter, reload) = reload::Layer::new(level.filter());
    let layer = fmt_layer::layer().with_writer(writer).with_ansi(colour);
    let layer: Box<dyn Layer<Registry> + Send + Sync> = match format {
        Format::Text => layer.boxed(),
        Format::Json => layer.json().flatten_event(true).with_span_list(false).boxed(),
    };
    let handle = Handle {
        apply: Arc::new(move |filter| reload.reload(filter).map_err(|_| LoggingError::Gone)),
        lost: LostLines::default(),
    };
    (layer.with_filter(filter), handle)
}

#[cfg(test)]
mod tests {
    use super::*;
    use parking_lot::Mutex;
    use std::io::Write;

    fn level(text: &str) -> Level {
        text.parse().unwrap()
    }

    impl Handle {
        /// A handle without a logger that keeps what was set last.
        pub(crate) fn noting(set: Arc<Mutex<Targets>>) -> Self {
            let apply = move |filter| {
                *set.lock() = filter;
                Ok(())
            };
            Self { apply: Arc::new(apply), lost: LostLines::default() }
        }
    }

    #[derive(Clone, Default)]
    struct Buffer(Arc<Mutex<Vec<u8>>>);

    impl Write for Buffer {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().write(bytes)
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    impl Buffer {
        fn take(&self) -> String {
            String::from_utf8(std::mem::take(&mut *self.0.lock())).unwrap()
        }
    }

    #[test]
    fn single_modules_have_levels_of_their_own() {
        let buffer = Buffer::default();
        let writer = buffer.clone();
        let (layer, handle) = layered(Format::Text, level("info"), move || writer.clone(), false);
        let subscriber = tracing_subscriber::registry().with(layer);
        tracing::subscriber::with_default(subscriber, || {
            handle.set(&"warn, tunnel_link::link=debug,h2=4".parse().unwrap()).unwrap();
            tracing::info!(target: "tunnel_link::relay", "hidden");
            tracing::debug!(target: "tunnel_link::link::flow", "of a module");
            tracing::debug!(target: "h2::codec", "of a library");
            let out = buffer.take();
            assert!(
                out.contains("of a module") && out.contains("of a library") && !out.contains("hidden"),
                "{out}"
            );
        });
        for wrong in ["", "info,", "info,a", "info,=debug", "info,a=", "info,a b=debug", "a=debug"] {
            assert!(wrong.parse::<Filter>().is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn the_level_can_be_changed() {
        let buffer = Buffer::default();
        let writer = buffer.clone();
        let (layer, handle) = layered(Format::Text, level("info"), move || writer.clone(), false);
        let subscriber = tracing_subscriber::registry().with(layer);
        tracing::subscriber::with_default(subscriber, || {
            tracing::debug!("hidden");
            tracing::info!("shown");
            tracing::info!(target: "h2::codec", "a library's");
            tracing::warn!(target: "kube_client::client", "hidden");
            tracing::error!(target: "kube_client::client::builder", "hidden");
            tracing::warn!(target: "kube_client::client::tls", "stale");
            let out = buffer.take();
            assert!(out.contains("shown") && !out.contains("hidden") && !out.contains("library"), "{out}");
            assert!(out.contains("stale"), "{out}");

            handle.set(&"4".parse().unwrap()).unwrap();
            tracing::debug!("now shown");
            tracing::trace!("hidden");
            tracing::info!(target: "h2::codec", "a library's");
            let out = buffer.take();
            assert!(
                out.contains("now shown") && !out.contains("hidden") && !out.contains("library"),
                "{out}"
            );

            handle.set(&"10".parse().unwrap()).unwrap();
            tracing::trace!(target: "h2::codec", "a library's");
            assert!(buffer.take().contains("library"));

            handle.set(&level("error").into()).unwrap();
            tracing::warn!(target: "postern::access", "hidden");
            assert_eq!(buffer.take(), "");
        });
    }

    #[test]
    fn json_has_the_fields_at_the_top_level() {
        let buffer = Buffer::default();
        let writer = buffer.clone();
        let (layer, _handle) = layered(Format::Json, level("info"), move || writer.clone(), false);
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || {
            tracing::info!(node = "edge-7", bytes = 42, "connection");
        });
        let line: serde_json::Value = serde_json::from_str(buffer.take().trim()).unwrap();
        assert_eq!(line["node"], "edge-7");
        assert_eq!(line["bytes"], 42);
        assert_eq!(line["message"], "connection");
        assert_eq!(line["level"], "INFO");
    }

    #[test]
    fn levels_by_name_and_number() {
        for (text, shown) in [
            ("off", "off"),
            ("error", "error"),
            ("info", "info"),
            ("WARN", "warn"),
            ("warning", "warn"),
            ("debug", "debug"),
            ("trace", "trace"),
            ("0", "info"),
            ("3", "info"),
            ("4", "debug"),
            ("9", "trace"),
            ("10", "10"),
            ("4294967295", "10"),
        ] {
            assert_eq!(level(text).to_string(), shown, "{text}");
            assert_eq!(level(shown), level(text));
        }
        for text in ["", "loud", "-1", "+ 1", "4294967296", "1.5", "info,debug"] {
            assert!(text.parse::<Level>().is_err(), "{text}");
        }
    }
}
