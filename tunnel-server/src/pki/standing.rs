//! Decides if a node's agent may have sessions and certificates, and its redirector links and certificates, by the
//! revocations and the inventory, at every attach, link, enrolment and renewal.

use std::sync::Arc;
use std::time::SystemTime;

use jiff::Timestamp;
use tokio::sync::watch;
use tunnel_pki::Holder;
use tunnel_routing::inventory::Inventory;
use tunnel_runtime::NodeName;

use super::revocations::Revocations;
use super::subject::Subject;

/// The nodes of the inventory, with their creation times if known.
pub type KnownNodes = Inventory;

/// Reason to refuse an agent or a redirector with a valid certificate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error(
        "{named} was revoked at {1:.0}; `tunnel-server agent readmit {arguments}` lets it return",
        named = .0.named(), arguments = .0.arguments()
    )]
    Revoked(Subject, Timestamp),
    #[error(
        "the revocation of {} cannot be read, so it stays in effect; the server's log names the file and the fix",
        .0.named()
    )]
    Damaged(Subject),
    #[error("the root that signed this certificate was retired: renew the certificate, or enrol again")]
    Retired,
    #[error("this certificate has expired at {0:.0}: renew it, or enrol again")]
    Expired(Timestamp),
    #[error("the token by which this agent was let in is no longer accepted: {0}")]
    Token(String),
    #[error(
        "node {0} was revoked, and this certificate is older than its readmission at {1:.0}: the agent must enrol again \
         (standalone: remove its state directory, which also makes a new key, and start it with a new token)"
    )]
    Superseded(NodeName, Timestamp),
    #[error(
        "this certificate is older than the present Node {0}, which was created again since: the agent must enrol again"
    )]
    Recreated(NodeName),
    #[error(
        "node {0} is not in the server's inventory; add it there, or start the server with --unknown-agents=allow"
    )]
    Unknown(NodeName),
    #[error(
        "{0} is an edge node, or its Node was one: a redirector reaches every edge node, so it runs on cloud hosts only \
         (if the host has moved to the cloud, delete its Node, which it then registers again)"
    )]
    Edge(NodeName),
}

impl Refusal {
    /// Label for metrics.
    pub const fn label(&self) -> &'static str {
        match self {
            Self::Revoked(..) | Self::Damaged(_) => "revoked",
            Self::Superseded(..) | Self::Recreated(_) => "superseded",
            Self::Retired => "retired",
            Self::Expired(_) => "expired",
            Self::Token(_) => "token",
            Self::Unknown(_) => "unknown_node",
            Self::Edge(_) => "edge_node",
        }
    }

    /// True if this certificate is refused for good, but another one of the node would not be.
    pub const fn wants_enrolment(&self) -> bool {
        matches!(self, Self::Superseded(..) | Self::Recreated(_))
    }

    /// True if the agent should retry soon: its node may be about to be listed, or its certificate is renewed.
    pub const fn is_for_now(&self) -> bool {
        matches!(self, Self::Unknown(_)) || self.wants_new_link()
    }

    /// True if the client may have renewed its certificate since, and shows it with a new link.
    pub const fn wants_new_link(&self) -> bool {
        matches!(self, Self::Retired | Self::Expired(_))
    }
}

/// Decides at any moment which agents and redirectors may have links and certificates. Clones share the state.
#[derive(Clone, Debug)]
pub struct Standing {
    revocations: watch::Receiver<Arc<Revocations>>,
    /// None while not known.
    nodes: watch::Receiver<Option<Arc<KnownNodes>>>,
    refuse_unknown: bool,
}

/// Nothing is known, so no agent is refused.
impl Default for Standing {
    fn default() -> Self {
        Self::new(watch::channel(Arc::default()).1, watch::channel(None).1, true)
    }
}

impl Standing {
    pub fn new(
        revocations: watch::Receiver<Arc<Revocations>>,
        nodes: watch::Receiver<Option<Arc<KnownNodes>>>,
        refuse_unknown: bool,
    ) -> Self {
        Self { revocations, nodes, refuse_unknown }
    }

    /// Judges an agent or a redirector by the node and the time of issue of its certificate.
    ///
    /// # Errors
    /// The reason for the refusal.
    pub fn judge(&self, (holder, node): (Holder, &NodeName), issued: SystemTime) -> Result<(), Refusal> {
        self.may_enrol((holder, node))?;
        if let Some(record) = self.revocations.borrow().records.get(&node.into())
            && issued <= record.issued_after()
        {
            let at = record.readmitted.unwrap_or(record.revoked);
            return Err(Refusal::Superseded(node.clone(), at));
        }
        // If the API server is unavailable at the start, no agent is locked out: the certificate itself is valid.
        match self.nodes.borrow().as_ref().map(|nodes| nodes.get(node.as_str())) {
            Some(None) if self.refuse_unknown => Err(Refusal::Unknown(node.clone())),
            Some(Some(known)) if known.created.is_some_and(|created| issued < created) => {
                Err(Refusal::Recreated(node.clone()))
            }
            _ => Ok(()),
        }
    }

    /// Checks that the node's agent or redirector may have a new certificate.
    ///
    /// # Errors
    /// If the node is revoked, or the redirector's node is an edge node: its kubelet can drop most labels of its own Node,
    /// and so be given a redirector's pod.
    pub fn may_enrol(&self, (holder, node): (Holder, &NodeName)) -> Result<(), Refusal> {
        self.not_revoked(node)?;
        let nodes = self.nodes.borrow();
        match nodes.as_ref().and_then(|nodes| nodes.get(node.as_str())) {
            Some(known) if holder == Holder::Redirector && !known.always_cloud() => {
                Err(Refusal::Edge(node.clone()))
            }
            _ => Ok(()),
        }
    }

    /// Checks the node's agent and redirector alike.
    ///
    /// # Errors
    /// If the node is revoked.
    pub fn not_revoked(&self, node: &NodeName) -> Result<(), Refusal> {
        self.check(&node.into())
    }

    /// Judges a server by its ID.
    ///
    /// # Errors
    /// If it is revoked.
    pub fn judge_server(&self, id: &str) -> Result<(), Refusal> {
        Subject::of_server(id).map_or(Ok(()), |server| self.check(&server))
    }

    fn check(&self, subject: &Subject) -> Result<(), Refusal> {
        let known = self.revocations.borrow();
        if known.damaged.contains(subject) {
            return Err(Refusal::Damaged(subject.clone()));
        }
        match known.records.get(subject) {
            Some(record) if record.readmitted.is_none() => {
                Err(Refusal::Revoked(subject.clone(), record.revoked))
            }
            _ => Ok(()),
        }
    }

    /// All revocations, for the other servers.
    pub(crate) fn revocations(&self) -> watch::Receiver<Arc<Revocations>> {
        self.revocations.clone()
    }

    /// The node's tokens created at or before this time are void.
    pub fn tokens_void_until(&self, node: &NodeName) -> Option<Timestamp> {
        self.revocations.borrow().records.get(&node.into()).map(|record| record.revoked)
    }

    /// A new certificate of the node must count as issued after this time.
    pub fn issue_after(&self, node: &NodeName) -> SystemTime {
        let readmitted =
            self.revocations.borrow().records.get(&node.into()).map(|record| record.issued_after());
        let created = self.nodes.borrow().as_ref().and_then(|nodes| nodes.get(node.as_str())?.created);
        readmitted.max(created).unwrap_or(SystemTime::UNIX_EPOCH)
    }

    /// The state that judgements are based on.
    pub(crate) fn known(&self) -> (Arc<Revocations>, Option<Arc<KnownNodes>>) {
        (self.revocations.borrow().clone(), self.nodes.borrow().clone())
    }

    /// Waits until the state changes.
    pub async fn changed(&mut self) {
        // A closed channel brings no more changes.
        tokio::select! {
            Ok(()) = self.revocations.changed() => {}
            Ok(()) = self.nodes.changed() => {}
            else => std::future::pending().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures_util::FutureExt as _;
    use tunnel_routing::inventory::InventoryNode;

    use super::super::revocations::Revocation;
    use super::*;

    fn node(name: &str) -> NodeName {
        name.parse().unwrap()
    }

    fn judge(standing: &Standing, node: &NodeName, issued: SystemTime) -> Result<(), Refusal> {
        standing.judge((Holder::Agent, node), issued)
    }

    type Nodes = watch::Sender<Option<Arc<KnownNodes>>>;

    /// Nodes with their creation times.
    fn nodes<const N: usize>(nodes: [(&str, Option<SystemTime>); N]) -> Option<Arc<KnownNodes>> {
        let node = |(name, created): (&str, _)| InventoryNode {
            created,
            ..InventoryNode::new(name.parse().unwrap())
        };
        Some(Arc::new(nodes.into_iter().map(node).collect()))
    }

    fn standing(refuse: bool) -> (Standing, watch::Sender<Arc<Revocations>>, Nodes) {
        let (revocations, nodes) = (watch::Sender::default(), watch::Sender::new(None));
        (Standing::new(revocations.subscribe(), nodes.subscribe(), refuse), revocations, nodes)
    }

    #[test]
    fn a_readmitted_node_needs_a_newer_certificate() {
        let (standing, revocations, _nodes) = standing(true);
        let (edge, now) = (node("edge-1"), Timestamp::now());
        let issued = SystemTime::from(now) - Duration::from_secs(1000);
        assert_eq!(judge(&standing, &edge, issued), Ok(()));
        let publish = |record: Revocation| {
            let records = [(record.subject.clone(), record)].into();
            revocations.send_replace(Arc::new(Revocations { records, ..Revocations::default() }));
        };
        let revoked = Revocation::revoke(None, &edge, now);
        publish(revoked.clone());
        assert_eq!(judge(&standing, &edge, issued), Err(Refusal::Revoked((&edge).into(), now)));
        assert!(standing.not_revoked(&edge).is_err() && standing.not_revoked(&node("edge-2")).is_ok());
        // In the same second.
        publish(revoked.readmit(now).unwrap());
        let refusal = judge(&standing, &edge, issued).unwrap_err();
        assert!(refusal.wants_enrolment(), "{refusal}");
        // By a server whose clock is slightly ahead.
        assert!(judge(&standing, &edge, SystemTime::from(now) + Duration::from_secs(30)).is_err());
        assert_eq!(standing.not_revoked(&edge), Ok(()));
        let next = standing.issue_after(&edge) + Duration::from_secs(1);
        assert_eq!(judge(&standing, &edge, next), Ok(()));
        assert_eq!(standing.tokens_void_until(&edge), Some(now));
    }

    #[test]
    fn a_refusal_says_what_may_end_it() {
        let (edge, now) = (node("edge-1"), Timestamp::now());
        for (refusal, wants_enrolment, is_for_now) in [
            (Refusal::Revoked((&edge).into(), now), false, false),
            (Refusal::Damaged((&edge).into()), false, false),
            (Refusal::Retired, false, true),
            (Refusal::Expired(now), false, true),
            (Refusal::Superseded(edge.clone(), now), true, false),
            (Refusal::Recreated(edge.clone()), true, false),
            (Refusal::Unknown(edge.clone()), false, true),
            (Refusal::Edge(edge), false, false),
        ] {
            let found = (refusal.wants_enrolment(), refusal.is_for_now());
            assert_eq!(found, (wants_enrolment, is_for_now), "{refusal}");
        }
    }

    #[test]
    fn a_new_certificate_counts_after_readmission_and_creation() {
        let (standing, revocations, known) = standing(true);
        let (edge, now) = (node("edge-1"), Timestamp::now());
        assert_eq!(standing.issue_after(&edge), SystemTime::UNIX_EPOCH);
        assert_eq!(standing.tokens_void_until(&edge), None);
        let record = Revocation::revoke(None, &edge, now).readmit(now).unwrap();
        let readmitted = record.issued_after();
        let records = [((&edge).into(), record)].into();
        revocations.send_replace(Arc::new(Revocations { records, ..Revocations::default() }));
        assert_eq!(standing.issue_after(&edge), readmitted);
        for (created, after) in [
            (readmitted - Duration::from_secs(1), readmitted),
            (readmitted + Duration::from_secs(1), readmitted + Duration::from_secs(1)),
        ] {
            known.send_replace(nodes([("edge-1", Some(created))]));
            assert_eq!(standing.issue_after(&edge), after);
        }
    }

    #[test]
    fn a_change_of_either_is_waited_for() {
        let (mut standing, revocations, nodes) = standing(true);
        let mut changed = || standing.changed().now_or_never().is_some();
        assert!(!changed());
        revocations.send_replace(Arc::default());
        assert!(changed() && !changed());
        nodes.send_replace(None);
        assert!(changed() && !changed());
        drop(revocations);
        nodes.send_replace(None);
        assert!(changed() && !changed());
        drop(nodes);
        assert!(!changed(), "nothing comes any more");
    }

    #[test]
    fn a_server_is_revoked_by_its_host_and_readmitted() {
        let (standing, revocations, _nodes) = standing(true);
        let (server, now) = (Subject::Server("cloud-1".parse().unwrap()), Timestamp::now());
        let publish = |record: Revocation| {
            let records = [(record.subject.clone(), record)].into();
            revocations.send_replace(Arc::new(Revocations { records, ..Revocations::default() }));
        };
        let record = Revocation::revoke(None, server.clone(), now);
        publish(record.clone());
        let refusal = standing.judge_server("cloud-1-0a1b2c3d").unwrap_err();
        assert_eq!(refusal, Refusal::Revoked(server, now));
        assert!(refusal.to_string().contains("agent readmit --server cloud-1"), "{refusal}");
        assert_eq!(standing.judge_server("cloud-2-0a1b2c3d"), Ok(()));
        let redirector = (Holder::Redirector, &node("cloud-1"));
        assert_eq!(standing.judge(redirector, SystemTime::now()), Ok(()), "its host's redirector");
        publish(record.readmit(now).unwrap());
        assert_eq!(standing.judge_server("cloud-1-0a1b2c3d"), Ok(()));
    }

    #[test]
    fn a_damaged_record_revokes() {
        let (standing, revocations, _nodes) = standing(false);
        let damaged = [(&node("edge-1")).into()].into();
        revocations.send_replace(Arc::new(Revocations { damaged, ..Revocations::default() }));
        assert_eq!(
            judge(&standing, &node("edge-1"), SystemTime::now()),
            Err(Refusal::Damaged((&node("edge-1")).into()))
        );
    }

    #[test]
    fn the_inventory_decides_once_it_is_known() {
        let now = SystemTime::now();
        for refuse in [true, false] {
            let (standing, _revocations, known) = standing(refuse);
            assert_eq!(judge(&standing, &node("edge-1"), now), Ok(()), "it is not known");
            known.send_replace(nodes([("edge-2", None), ("edge-3", Some(now))]));
            let unknown = judge(&standing, &node("edge-1"), now);
            assert_eq!(unknown, if refuse { Err(Refusal::Unknown(node("edge-1"))) } else { Ok(()) });
            assert_eq!(judge(&standing, &node("edge-2"), now), Ok(()));
            assert_eq!(judge(&standing, &node("edge-3"), now), Ok(()));
            let before = now - Duration::from_secs(1);
            assert_eq!(judge(&standing, &node("edge-3"), before), Err(Refusal::Recreated(node("edge-3"))));
        }
    }

    #[test]
    fn an_edge_node_has_an_agent_and_no_redirector() {
        let (standing, _revocations, known) = standing(true);
        let (host, now) = (node("host"), SystemTime::now());
        let named =
            |edge, was_edge| InventoryNode { edge, was_edge, ..InventoryNode::new("host".parse().unwrap()) };
        for (edge, was_edge) in [(false, false), (true, false), (false, true)] {
            known.send_replace(Some(Arc::new([named(edge, was_edge)].into_iter().collect())));
            let expected = if edge || was_edge { Err(Refusal::Edge(host.clone())) } else { Ok(()) };
            assert_eq!(standing.judge((Holder::Redirector, &host), now), expected);
            assert_eq!(standing.may_enrol((Holder::Redirector, &host)), expected);
            assert_eq!(standing.judge((Holder::Agent, &host), now), Ok(()));
        }
    }
}
