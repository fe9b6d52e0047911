//! What an operator can be shown about the redirect: whether this host has all that it needs, and whether it works.

use super::attached::{self, AttachType};
use super::cgroup::Cgroup;
use super::config::RedirectConfig;
use super::error::RedirectError;
use super::running::Redirect;
use super::{load, preflight};

#[derive(Clone, Debug)]
pub struct Check {
    pub name: &'static str,
    /// What was found, or what is wrong and how to fix it.
    pub outcome: Result<String, String>,
}

/// Checks everything that [`Redirect::start`] needs, without changing anything.
pub fn checks(config: &RedirectConfig) -> Vec<Check> {
    let check = |name, outcome: Result<String, RedirectError>| Check {
        name,
        outcome: outcome.map_err(|error| error.to_string()),
    };
    let mut all = vec![
        check("programs", load::embedded().map(|object| format!("embedded, {} bytes", object.len()))),
        check(
            "kernel",
            preflight::probe(config).map(|features| {
                let connect =
                    if features.set_retval { "fails at connect()" } else { "is accepted and reset" };
                format!("{}; a connect to a node without a tunnel {connect}", preflight::release())
            }),
        ),
        Check {
            name: "ipv6",
            outcome: Ok(match preflight::ipv6_usable() {
                Ok(()) => "on".into(),
                Err(reason) => format!("off ({reason}); IPv6 destinations are not redirected"),
            }),
        },
    ];
    let cgroup = Cgroup::find(config.cgroup.as_deref());
    if let Ok(cgroup) = &cgroup {
        let foreign = AttachType::CGROUP.into_iter().find_map(|hook| attached::foreign(&cgroup.path, hook));
        all.push(check("other programs", foreign.map_or(Ok("none that excludes ours".into()), Err)));
    }
    all.push(check("cgroup", cgroup.map(|cgroup| cgroup.path.display().to_string())));
    all
}

impl Redirect {
    /// [`checks`], and whether the redirect works as it runs.
    pub fn checks(&self) -> Vec<Check> {
        let mut all = checks(&self.config);
        let lost = self.lock().programs.lost(&self.cgroup, &self.netns);
        all.push(Check {
            name: "attached",
            outcome: match lost {
                Ok(lost) if lost.is_empty() => Ok("every hook".into()),
                Ok(lost) => {
                    Err(format!("missing from {}: the next verification attaches again", lost.join(", ")))
                }
                Err(error) => Err(error.to_string()),
            },
        });
        let problem = self.health().problem;
        all.push(Check { name: "self-test", outcome: problem.map_or(Ok("passed".into()), Err) });
        all
    }
}
