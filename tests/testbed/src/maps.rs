//! What the BPF maps of a running program hold, read from the kernel and not from what the program says.
use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use anyhow::{Context as _, Result};
use aya::Pod;
use aya::maps::{LpmTrie, Map, MapData, MapInfo};
use tunnel_abi::{Mapping, V4, V6, names};

/// The number of entries of each of its tries, by the map's name.
pub fn entries(pid: u32) -> Result<BTreeMap<String, usize>> {
    let mut counted = BTreeMap::new();
    for id in ids(pid)? {
        let info = MapInfo::from_id(id).with_context(|| format!("the BPF map {id}"))?;
        let name = info.name_as_str().unwrap_or_default().to_owned();
        let data = MapData::from_id(id).with_context(|| format!("opening the map {name}"))?;
        let count = match name.as_str() {
            names::EXCLUDED_V4 | names::CLIENTS_V4 => count::<V4, u32>(data),
            names::EXCLUDED_V6 | names::CLIENTS_V6 => count::<V6, u32>(data),
            names::ROUTES_V4 | names::ORIGINS_V4 => count::<V4, Mapping<V4>>(data),
            names::ROUTES_V6 | names::ORIGINS_V6 => count::<V6, Mapping<V6>>(data),
            // An array has as many as it was made with.
            _ => continue,
        };
        *counted.entry(name.clone()).or_insert(0) +=
            count.with_context(|| format!("reading the map {name}"))?;
    }
    Ok(counted)
}

fn count<K: Pod, V: Pod>(data: MapData) -> Result<usize> {
    let trie = LpmTrie::<_, K, V>::try_from(Map::LpmTrie(data))?;
    trie.keys().try_fold(0, |count, key| Ok(key.map(|_| count + 1)?))
}

/// The maps of which the process has a descriptor.
fn ids(pid: u32) -> Result<BTreeSet<u32>> {
    let folder = format!("/proc/{pid}/fdinfo");
    let mut ids = BTreeSet::new();
    for entry in fs::read_dir(&folder).with_context(|| format!("reading {folder}"))? {
        // A descriptor that was closed meanwhile.
        let Ok(text) = fs::read_to_string(entry?.path()) else { continue };
        let id = text.lines().find_map(|line| line.strip_prefix("map_id:"));
        ids.extend(id.and_then(|id| id.trim().parse::<u32>().ok()));
    }
    Ok(ids)
}
