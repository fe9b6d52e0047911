//! Patches, and the field managers that own applied fields.

use std::collections::BTreeMap;

use serde_json::Value;

/// Applied values of fields, by object (its uid) and field manager. A manager owns a field as long as the field has the
/// value that the manager applied.
#[derive(Default)]
pub(crate) struct Applied(BTreeMap<(String, String), BTreeMap<String, Value>>);

impl Applied {
    /// A field of `known` that an apply of `body` by `manager` would change, although it is not the manager's own. Every
    /// field that has a value has an owner.
    pub(crate) fn conflict(&self, manager: &str, known: &Value, body: &Value) -> Option<String> {
        let own = self.0.get(&key(manager, known));
        fields(body).into_iter().find_map(|(path, value)| {
            let is = known.pointer(&path).filter(|is| !is.is_null())?;
            let owned = own.and_then(|own| own.get(&path)) == Some(is);
            (*is != value && !owned).then_some(path)
        })
    }

    pub(crate) fn record(&mut self, manager: &str, stored: &Value, body: &Value) {
        self.0.entry(key(manager, stored)).or_default().extend(fields(body));
    }
}

fn key(manager: &str, object: &Value) -> (String, String) {
    (object["metadata"]["uid"].as_str().unwrap_or_default().to_owned(), manager.to_owned())
}

/// The fields that an apply sets, as JSON pointers: objects are entered, lists are one field. Fields that identify the
/// object have no owner.
fn fields(body: &Value) -> BTreeMap<String, Value> {
    fn enter(path: &str, value: &Value, fields: &mut BTreeMap<String, Value>) {
        match value {
            Value::Object(entries) => {
                for (name, value) in entries {
                    let name = name.replace('~', "~0").replace('/', "~1");
                    enter(&format!("{path}/{name}"), value, fields);
                }
            }
            Value::Null => {}
            _ => drop(fields.insert(path.to_owned(), value.clone())),
        }
    }
    let mut all = BTreeMap::new();
    enter("", body, &mut all);
    for path in ["/apiVersion", "/kind", "/metadata/name", "/metadata/namespace", "/metadata/resourceVersion"]
    {
        all.remove(path);
    }
    all
}

/// Merges by RFC 7396, and with `strategic` by the part of the strategic merge that is used here: conditions by type.
pub(crate) fn merge(target: &mut Value, patch: &Value, strategic: bool) {
    let Value::Object(patch) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = Value::Object(serde_json::Map::new());
    }
    let Value::Object(target) = target else { unreachable!("made an object above") };
    for (key, value) in patch {
        match (value, target.get_mut(key)) {
            (Value::Null, _) => {
                target.remove(key);
            }
            (Value::Array(new), Some(Value::Array(old))) if strategic && key == "conditions" => {
                for condition in new {
                    if condition["$patch"] == "delete" {
                        old.retain(|known| known["type"] != condition["type"]);
                        continue;
                    }
                    match old.iter_mut().find(|known| known["type"] == condition["type"]) {
                        Some(known) => merge(known, condition, true),
                        None => old.push(condition.clone()),
                    }
                }
            }
            _ => merge(target.entry(key.clone()).or_insert(Value::Null), value, strategic),
        }
    }
}
