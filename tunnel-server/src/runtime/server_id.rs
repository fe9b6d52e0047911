//! The name by which servers tell each other apart.

/// Returns the host's name and a random number, which differs between two servers on one host.
pub(crate) fn server_id() -> String {
    let host = nix::unistd::gethostname()
        .map_or_else(|_| "server".into(), |name| name.to_string_lossy().into_owned());
    format!("{host}-{:08x}", rand::random::<u32>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pki::Subject;

    #[test]
    fn servers_of_one_host_are_revoked_together() {
        let [one, other] = [server_id(), server_id()].map(|id| Subject::of_server(&id));
        assert_eq!(one, other);
    }
}
