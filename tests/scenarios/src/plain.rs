//! The plain listener: HTTP by a node's name for clients in the cloud.
use anyhow::{Result, ensure};
use postern_testbed::Testbed;
use postern_testbed::agent::Agent;
use postern_testbed::server::Builder;

use crate::web::{Web, curl};

scenarios! {
    listed_clients_reach_nodes_by_name(quick),
    others_are_refused,
}

const PORT: u16 = 9100;

async fn listed_clients_reach_nodes_by_name(testbed: &Testbed) -> Result<()> {
    let builder = Builder::new(testbed).flag("--plain-port=10268").flag("--plain-ports=9100");
    let server = builder.flag("--plain-clients=10.70.0.0/24").start().await?;
    let _agent = Agent::enrol(&server, 1).await?;
    let (web, other) = (Web::start(testbed, 1, PORT)?, Web::start(testbed, 1, 9101)?);
    // As through the internal Service: the node's name leads to the listener, whatever the port.
    let to = "edge-1:9100:10.70.0.1:10268";
    let answer = curl(testbed, &["--connect-to", to, "http://edge-1:9100/metrics"]).await?;
    answer.expect(200, "host: edge-1:9100")?;
    ensure!(web.connections() == 1, "{} connections", web.connections());
    let to = "edge-1:9101:10.70.0.1:10268";
    let answer = curl(testbed, &["--connect-to", to, "http://edge-1:9101/metrics"]).await?;
    answer.expect(403, "port 9101 is not in --plain-ports")?;
    ensure!(other.connections() == 0, "a port that is not listed was reached");
    let line = server.wait_access("of the plain listener", |line| line.text("listener") == "plain").await?;
    ensure!(line.text("outcome") == "ok", "access line {line:?}");
    Ok(())
}

async fn others_are_refused(testbed: &Testbed) -> Result<()> {
    let builder = Builder::new(testbed).flag("--plain-port=10268").flag("--plain-clients=192.0.2.0/24");
    let server = builder.start().await?;
    let _agent = Agent::enrol(&server, 1).await?;
    let web = Web::start(testbed, 1, PORT)?;
    let asked = ["http://10.70.0.1:10268/", "-H", "Host: edge-1:9100"];
    let answer = curl(testbed, &asked).await?;
    answer.expect(401, "is not in --plain-clients, and the request has no bearer token")?;
    let answer = curl(testbed, &[&asked[..], &["-H", "Authorization: Bearer x"]].concat()).await?;
    answer.expect(403, "a token or password is taken over TLS only: use the https listener")?;
    let local = ["http://127.0.0.1:10268/", "-H", "Host: edge-1:9100", "-H", "Authorization: Bearer x"];
    curl(testbed, &local).await?.expect(401, "nobody who knows bearer tokens")?;
    ensure!(web.connections() == 0, "a client that is not listed reached the edge");
    Ok(())
}
