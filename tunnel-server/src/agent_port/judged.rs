//! Judges a client and its certificate when a link begins, and as long as it lasts.

use std::sync::Arc;
use std::time::Duration;

use rustls_pki_types::CertificateDer;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tunnel_pki::{Client, Holder, IdentityError};
use tunnel_runtime::NodeName;

use super::link::LinkContext;
use crate::pki::{Credential, Refusal};

/// Interval at which links are judged if nothing changes but the time.
pub(super) const SWEEP: Duration = Duration::from_secs(300);

impl LinkContext {
    /// The parts of a certificate that are kept.
    ///
    /// # Errors
    /// It cannot be read.
    pub(super) fn credential(
        &self,
        certificate: &CertificateDer<'_>,
    ) -> Result<Arc<Credential>, IdentityError> {
        Ok(Arc::new(Credential::of(certificate, &self.bundle.borrow(), self.sessions.router.clock())?))
    }

    /// The only rule for links: neither end is revoked, the inventory knows the node, a redirector's is no edge node, and the
    /// certificate is of a root in force and has not expired.
    ///
    /// # Errors
    /// The reason of the refusal.
    pub(super) fn judge(&self, client: &Client, credential: &Credential) -> Result<(), Refusal> {
        self.standing.judge_server(&self.server_id)?;
        match client {
            Client::Agent(node) => self.standing.judge((Holder::Agent, node), credential.issued)?,
            Client::Redirector(node) => self.standing.judge((Holder::Redirector, node), credential.issued)?,
            Client::Server(id) => self.standing.judge_server(id)?,
        }
        credential.judge(&self.bundle.borrow(), Instant::now())
    }

    /// The same for the agent of a node.
    pub(super) fn judge_agent(&self, node: &NodeName, credential: &Credential) -> Result<(), Refusal> {
        self.judge(&Client::Agent(node.clone()), credential)
    }
}

/// The client of a link.
pub(super) struct Judged {
    pub(super) context: Arc<LinkContext>,
    pub(super) client: Client,
    pub(super) credential: Arc<Credential>,
    /// Cancelled when the client is to make a new link, which shows its renewed certificate.
    pub(super) new_link: CancellationToken,
}

impl Judged {
    /// # Errors
    /// The certificate cannot be read.
    pub(super) fn new(
        context: Arc<LinkContext>,
        client: Client,
        certificate: &CertificateDer<'_>,
    ) -> Result<Self, IdentityError> {
        let credential = context.credential(certificate)?;
        Ok(Self { context, client, credential, new_link: CancellationToken::new() })
    }

    /// Its name in the log: a server's ID, or a node in words.
    pub(super) fn name(&self) -> String {
        match &self.client {
            Client::Server(id) => id.clone(),
            Client::Redirector(node) => format!("redirector of {node}"),
            Client::Agent(node) => format!("agent of {node}"),
        }
    }

    pub(super) const fn is_redirector(&self) -> bool {
        matches!(self.client, Client::Redirector(_))
    }

    /// # Errors
    /// The reason of the refusal.
    pub(super) fn judge(&self) -> Result<(), Refusal> {
        self.context.judge(&self.client, &self.credential)
    }

    /// Waits until the link has to end.
    pub(super) async fn refused(&self) -> Refusal {
        let (mut standing, mut roots) = (self.context.standing.clone(), self.context.bundle.clone());
        let mut ends = None;
        loop {
            let now = Instant::now();
            let next = match self.judge() {
                Ok(()) => {
                    ends = None;
                    now + SWEEP
                }
                Err(refusal) => {
                    let end = refusal.ends(ends, now, self.context.drain_timeout);
                    if end <= now {
                        return refusal;
                    }
                    if refusal.wants_new_link() {
                        self.new_link.cancel();
                    }
                    ends = Some(end);
                    end
                }
            };
            tokio::select! {
                () = standing.changed() => {}
                Ok(()) = roots.changed() => {}
                () = sleep_until(next) => {}
            }
        }
    }
}
