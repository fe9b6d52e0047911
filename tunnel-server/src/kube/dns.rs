//! The DNS records, for CoreDNS's hosts plugin.
