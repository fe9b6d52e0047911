//! Metadata of the call by which an agent attaches, and of its answer.

use tonic::metadata::MetadataMap;

/// Returns the value of a key that occurs exactly once, as each of theirs must.
pub fn single<'a>(metadata: &'a MetadataMap, key: &str) -> Option<&'a str> {
    let mut values = metadata.get_all(key).iter();
    match (values.next(), values.next()) {
        (Some(value), None) => value.to_str().ok(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_there_once() {
        let mut metadata = MetadataMap::new();
        assert_eq!(single(&metadata, "serverid"), None);
        metadata.append("serverid", "one".parse().unwrap());
        assert_eq!(single(&metadata, "serverid"), Some("one"));
        metadata.append("serverid", "two".parse().unwrap());
        assert_eq!(single(&metadata, "serverid"), None);
    }
}
