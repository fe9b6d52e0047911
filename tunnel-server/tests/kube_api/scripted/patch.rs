//! Patches.

use serde_json::Value;

/// RFC 7396, and with `strategic` the part of the strategic merge that is used here: conditions are merged by type.
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
