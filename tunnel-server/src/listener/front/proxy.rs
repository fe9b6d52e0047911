//! Requests of a proxy's clients: CONNECT, and requests with a whole `http://` URL.

use http::request::Parts;
use hyper::body::{Body as _, Incoming};
use tunnel_runtime::NodeName;

use super::admitted::Admitted;
use super::headers::wanted_upgrade;
use super::served::Served;
use crate::caller::Shown;
use crate::listener::answer::Failure;
use crate::listener::connect::{Reception, parse};

impl Served {
    /// Resolves the target, if the policy permits it. `node`: the edge node that the client is on, if any.
    pub(super) async fn permitted(
        &self,
        reception: &Reception,
        node: Option<&NodeName>,
        head: &Parts,
        body: &Incoming,
    ) -> Result<Admitted, Failure> {
        let request = parse(head).map_err(Failure::bad_request)?;
        // A client that frames a body means something else by CONNECT (RFC 9110 section 9.3.6).
        if head.method == http::Method::CONNECT && !body.is_end_stream() {
            return Err(Failure::bad_request("a CONNECT request has no body"));
        }
        let client = self.peer.client.ip().to_canonical();
        let shown =
            match (node, self.peer.certificate().map_err(|refusal| Failure::from(refusal).at_proxy())?) {
                (Some(node), _) => Shown::Node(node.clone()),
                (None, Some((caller, certified))) => Shown::Certificate(caller.clone(), certified.clone()),
                (None, None) => Shown::Nothing,
            };
        let secure = node.is_some() || !self.front.is_exposed(client);
        let (reached, caller, permit) = reception.decide(&request, shown, client, secure).await?;
        let (caller, permit, upgrade) = (Some(caller), Some(permit), wanted_upgrade(head));
        Ok(Admitted { reached, caller, permit, by_token: false, on_edge: None, upgrade })
    }
}
