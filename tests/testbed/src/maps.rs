//! The BPF maps of a running program: their contents, read from the kernel and not as reported by the program.
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::ErrorKind;
use std::net::Ipv4Addr;

use anyhow::{Context as _, Result, bail};
use aya::Pod;
use aya::maps::lpm_trie::Key;
use aya::maps::{LpmTrie, Map, MapData, MapError, MapInfo};
use tunnel_abi::{DOWN, Mapping, ROUTE_ENTRIES, V4, V6, names};

/// Returns the number of entries of each of its LPM tries, by the map's name.
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
            // An array always has its full number of entries.
            _ => continue,
        };
        *counted.entry(name.clone()).or_insert(0) +=
            count.with_context(|| format!("reading the map {name}"))?;
    }
    Ok(counted)
}

/// Fills the map of its IPv4 routes with unused addresses until the map is full.
pub fn fill_routes(pid: u32) -> Result<()> {
    for id in ids(pid)? {
        let info = MapInfo::from_id(id).with_context(|| format!("the BPF map {id}"))?;
        if info.name_as_str() != Some(names::ROUTES_V4) {
            continue;
        }
        let data = MapData::from_id(id).context("opening the map of routes")?;
        let mut routes = LpmTrie::<_, V4, Mapping<V4>>::try_from(Map::LpmTrie(data))?;
        let value = Mapping { base: Ipv4Addr::UNSPECIFIED.into(), host_mask: V4(0), flags: DOWN };
        for number in 0..=ROUTE_ENTRIES {
            // In 240.0.0.0/4, which RFC 1112 reserves.
            let address = Ipv4Addr::from_bits(0xf000_0000 | number);
            match routes.insert(&Key::new(32, address.into()), value, 0) {
                Ok(()) => {}
                Err(MapError::SyscallError(error)) if error.io_error.kind() == ErrorKind::StorageFull => {
                    return Ok(());
                }
                Err(error) => return Err(error).context("filling the map of routes"),
            }
        }
        bail!("{ROUTE_ENTRIES} routes do not fill the map");
    }
    bail!("process {pid} has no map of routes")
}

fn count<K: Pod, V: Pod>(data: MapData) -> Result<usize> {
    let trie = LpmTrie::<_, K, V>::try_from(Map::LpmTrie(data))?;
    trie.keys().try_fold(0, |count, key| Ok(key.map(|_| count + 1)?))
}

/// Returns the IDs of the maps to which the process has a descriptor.
fn ids(pid: u32) -> Result<BTreeSet<u32>> {
    let folder = format!("/proc/{pid}/fdinfo");
    let mut ids = BTreeSet::new();
    for entry in fs::read_dir(&folder).with_context(|| format!("reading {folder}"))? {
        // The descriptor may have been closed meanwhile.
        let Ok(text) = fs::read_to_string(entry?.path()) else { continue };
        let id = text.lines().find_map(|line| line.strip_prefix("map_id:"));
        ids.extend(id.and_then(|id| id.trim().parse::<u32>().ok()));
    }
    Ok(ids)
}
