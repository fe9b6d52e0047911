//! The CA as texts, and the steps of a rotation on them.

use std::collections::BTreeMap;
use std::fmt;

use tunnel_pki::{PrivateKey, TrustBundle, Zeroizing, ca_hash, pem_of_certificates};

use super::ca_state::{CaState, Lifetimes, Role, Root, short_hash};
use super::error::PkiError;

/// Name of the text with the roots.
pub(crate) const ROOTS: &str = "ca.crt";
pub(crate) const KEY_SUFFIX: &str = ".key";

/// The CA as named texts, the common form of its directory and its Secret: `ca.crt` has the roots, the signing one
/// first, and `<16 hex>.key` the key of the root whose hash starts with these digits.
///
/// Each step of a rotation returns new material; [`Ca`](super::Ca) or the Secret's writer has to store it in one step.
#[derive(Clone, PartialEq, Eq)]
pub struct CaMaterial {
    roots: String,
    keys: BTreeMap<String, Zeroizing<String>>,
}

/// Omits the keys.
impl fmt::Debug for CaMaterial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CaMaterial").field("keys", &self.keys.keys()).finish_non_exhaustive()
    }
}

/// Name of the text with the key of the root with this hash.
pub(super) fn key_name(hash: &str) -> String {
    format!("{}{KEY_SUFFIX}", short_hash(hash))
}

/// Names of the roots' keys, present or not.
pub(super) fn key_names(roots: &str) -> Result<Vec<String>, PkiError> {
    let bundle = TrustBundle::from_pem(roots).map_err(|error| PkiError::material(ROOTS, &error))?;
    Ok(bundle.hashes().iter().map(|hash| key_name(hash)).collect())
}

impl CaMaterial {
    pub fn generate() -> Result<Self, PkiError> {
        let (root, key) = Root::create(1)?;
        let keys = BTreeMap::from([(key_name(&root.hash), key.to_pem())]);
        Ok(Self { roots: pem_of_certificates(std::slice::from_ref(&root.certificate)), keys })
    }

    /// Does not check the texts; [`CaMaterial::state`] does.
    pub fn new(roots: String, keys: BTreeMap<String, Zeroizing<String>>) -> Self {
        Self { roots, keys }
    }

    /// The text of `ca.crt`.
    pub fn roots(&self) -> &str {
        &self.roots
    }

    pub fn keys(&self) -> &BTreeMap<String, Zeroizing<String>> {
        &self.keys
    }

    /// Parses the texts.
    ///
    /// # Errors
    /// [`PkiError::Material`] with the name of the invalid text.
    pub fn state(&self, lifetimes: Lifetimes) -> Result<CaState, PkiError> {
        let bundle = TrustBundle::from_pem(&self.roots).map_err(|error| PkiError::material(ROOTS, &error))?;
        let mut roots = Vec::new();
        for (index, certificate) in bundle.roots().iter().enumerate() {
            let name = key_name(&ca_hash(certificate)?);
            let key = match self.keys.get(&name) {
                Some(pem) => {
                    Some(PrivateKey::from_pem(pem).map_err(|error| PkiError::material(&name, &error))?)
                }
                None if index == 0 => {
                    return Err(PkiError::material(&name, &"the signing root's key is missing"));
                }
                None => None,
            };
            let root =
                Root::new(certificate.clone(), key).map_err(|error| PkiError::material(&name, &error))?;
            roots.push(root);
        }
        CaState::new(roots, lifetimes)
    }

    /// The state with default lifetimes, which do not matter to a rotation.
    fn present(&self) -> Result<CaState, PkiError> {
        self.state(Lifetimes::default())
    }

    fn with_roots(&self, roots: &[&Root]) -> Result<Self, PkiError> {
        let certificates = roots.iter().map(|root| root.certificate.clone()).collect();
        let names: Vec<_> = roots.iter().map(|root| key_name(&root.hash)).collect();
        let mut keys = self.keys.clone();
        keys.retain(|name, _| names.contains(name));
        Ok(Self { roots: TrustBundle::new(certificates)?.to_pem(), keys })
    }

    /// First step of a rotation: adds a new root that is trusted besides the signing one. Also returns its hash.
    pub fn introduce(&self) -> Result<(Self, String), PkiError> {
        let state = self.present()?;
        if let Some(other) = state.roots().get(1) {
            return Err(PkiError::Rotation(match state.role(other) {
                Role::Introduced => format!(
                    "a rotation is under way: root {} is introduced and waits for `ca activate`",
                    other.hash
                ),
                _ => format!("a rotation is under way: root {} waits for `ca retire`", other.hash),
            }));
        }
        let generation = state.roots().iter().map(|root| root.generation).max().unwrap_or(0) + 1;
        let (root, key) = Root::create(generation)?;
        let all: Vec<_> = state.roots().iter().chain([&root]).collect();
        let mut next = self.with_roots(&all)?;
        next.keys.insert(key_name(&root.hash), key.to_pem());
        Ok((next, root.hash))
    }

    /// Second step: makes the introduced root sign. Also returns its hash.
    pub fn activate(&self) -> Result<(Self, String), PkiError> {
        let state = self.present()?;
        let introduced =
            state.roots().iter().find(|root| state.role(root) == Role::Introduced).ok_or_else(|| {
                PkiError::Rotation("there is no introduced root to activate; `ca introduce` makes one".into())
            })?;
        if !introduced.has_key() {
            return Err(PkiError::material(
                &key_name(&introduced.hash),
                &"the introduced root's key is missing",
            ));
        }
        let rest = state.roots().iter().filter(|root| root.hash != introduced.hash);
        let order: Vec<_> = std::iter::once(introduced).chain(rest).collect();
        Ok((self.with_roots(&order)?, introduced.hash.clone()))
    }

    /// Last step: removes the old root and its key. Also returns its hash. Does not check if any agent still needs it.
    pub fn retire(&self) -> Result<(Self, String), PkiError> {
        let state = self.present()?;
        let old = state.roots().iter().find(|root| state.role(root) == Role::Retiring).ok_or_else(|| {
            PkiError::Rotation(
                "there is no old root to retire; `ca introduce` and `ca activate` come first".into(),
            )
        })?;
        let kept: Vec<_> = state.roots().iter().filter(|root| root.hash != old.hash).collect();
        Ok((self.with_roots(&kept)?, old.hash.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn roles(material: &CaMaterial) -> Vec<Role> {
        let state = material.state(Lifetimes::default()).unwrap();
        state.roots().iter().map(|root| state.role(root)).collect()
    }

    #[test]
    fn a_rotation_changes_roots_and_keys_together() {
        let first = CaMaterial::generate().unwrap();
        assert_eq!((roles(&first), first.keys().len()), (vec![Role::Issuing], 1));
        assert!(matches!(first.activate(), Err(PkiError::Rotation(_))));
        let (both, new) = first.introduce().unwrap();
        assert_eq!((roles(&both), both.keys().len()), (vec![Role::Issuing, Role::Introduced], 2));
        assert!(matches!(both.introduce(), Err(PkiError::Rotation(_))));
        assert!(matches!(both.retire(), Err(PkiError::Rotation(_))));
        let mut keyless = both.clone();
        keyless.keys.remove(&key_name(&new));
        let error = keyless.activate().unwrap_err().to_string();
        assert!(
            error.contains(&key_name(&new)) && error.contains("the introduced root's key is missing"),
            "{error}"
        );
        let (active, hash) = both.activate().unwrap();
        let error = active.introduce().unwrap_err().to_string();
        assert!(
            error.contains(first.state(Lifetimes::default()).unwrap().hash())
                && error.contains("`ca retire`"),
            "{error}"
        );
        assert_eq!((roles(&active), hash), (vec![Role::Issuing, Role::Retiring], new.clone()));
        let (last, old) = active.retire().unwrap();
        assert_ne!(old, new);
        assert_eq!(
            (roles(&last), last.keys().keys().collect::<Vec<_>>()),
            (vec![Role::Issuing], vec![&key_name(&new)])
        );
    }

    #[test]
    fn errors_name_the_text_and_keys_are_masked() {
        let good = CaMaterial::generate().unwrap();
        let name = good.keys().keys().next().unwrap().clone();
        let other = CaMaterial::generate().unwrap();
        let foreign = BTreeMap::from([(name.clone(), other.keys().values().next().unwrap().clone())]);
        for (material, parts) in [
            (CaMaterial::new(String::new(), good.keys().clone()), ["ca.crt", "no certificate"]),
            (CaMaterial::new(good.roots().to_owned(), BTreeMap::new()), [name.as_str(), "key is missing"]),
            (CaMaterial::new(good.roots().to_owned(), foreign), [name.as_str(), "not the key of"]),
        ] {
            let error = material.state(Lifetimes::default()).map(|_| ()).unwrap_err().to_string();
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        }
        let pem = good.keys().values().next().unwrap();
        for line in pem.lines() {
            assert!(!format!("{good:?} {good:#?}").contains(line), "{good:?}");
        }
    }
}
