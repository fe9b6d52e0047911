//! Tests virtual addresses by example, and their invariants with random input.

use std::collections::HashSet;

use proptest::prelude::*;

use super::*;

/// Each owner's virtual address.
fn assign(
    virtual_addresses: &mut VirtualAddresses,
    mut owners: Vec<Owner>,
    now: Instant,
) -> HashMap<Owner, Option<IpAddr>> {
    owners.sort_by_key(Owner::key);
    let assigned = virtual_addresses.assign(&owners, now);
    assert_eq!(assigned.len(), owners.len());
    owners.into_iter().zip(assigned).map(|(owner, virtual_address)| (owner, virtual_address.ok())).collect()
}

/// Same for one pool, in the order of the owners.
fn of_pool(pool: &mut Pool, mut owners: Vec<Owner>, now: Instant) -> Vec<(Owner, Option<u128>)> {
    owners.sort_by_key(Owner::key);
    let assigned = pool.assign(owners.iter(), now);
    assert_eq!(assigned.len(), owners.len());
    owners.into_iter().zip(assigned).map(|(owner, virtual_address)| (owner, virtual_address.ok())).collect()
}

/// `size` addresses from 198.18.0.0; one is the network's and one is never assigned.
fn pool(size: u128) -> Pool {
    let first = u128::from(u32::from(Ipv4Addr::new(198, 18, 0, 0)));
    Pool::new(first, first + size)
}

fn owner(number: u8) -> Owner {
    Owner::Node(format!("edge-{number}").parse().unwrap(), IpAddr::from([10, 0, 0, number]))
}

fn one(pool: &mut Pool, number: u8, now: Instant) -> Option<String> {
    let assigned = of_pool(pool, vec![owner(number)], now);
    assigned[0].1.map(|virtual_address| Ipv4Addr::from(virtual_address as u32).to_string())
}

#[test]
fn a_departed_owners_virtual_address_is_unused_for_ten_minutes() {
    let mut pool = pool(5);
    let start = Instant::now();
    let first = one(&mut pool, 1, start);
    assert_eq!(first.as_deref(), Some("198.18.0.2"));
    assert_eq!(one(&mut pool, 2, start).as_deref(), Some("198.18.0.3"));
    let almost = start + QUARANTINE - Duration::from_millis(1);
    assert_eq!(one(&mut pool, 3, almost).as_deref(), Some("198.18.0.4"));
    assert_eq!(one(&mut pool, 4, start + QUARANTINE), first, "the oldest departed one is free again");
}

#[test]
fn an_owner_that_returns_in_time_gets_its_virtual_address_back() {
    let mut pool = pool(6);
    let start = Instant::now();
    let first = one(&mut pool, 1, start);
    one(&mut pool, 2, start);
    let later = start + Duration::from_secs(599);
    assert_eq!(one(&mut pool, 1, later), first);
    // It departs again now, so its quarantine restarts.
    one(&mut pool, 2, later);
    assert_ne!(one(&mut pool, 3, start + QUARANTINE + Duration::from_secs(1)), first);
}

#[test]
fn a_used_up_range_is_reported_and_recovers() {
    let mut pool = pool(7);
    let start = Instant::now();
    let assigned = of_pool(&mut pool, (0..6).map(owner).collect(), start);
    assert_eq!(
        assigned.iter().filter_map(|(_, virtual_address)| *virtual_address).collect::<HashSet<_>>().len(),
        5
    );
    assert_eq!(assigned.iter().filter(|(_, virtual_address)| virtual_address.is_none()).count(), 1);
    assert!(assigned.iter().all(|(_, virtual_address)| *virtual_address != Some(pool.unassigned)));
    assert_eq!(one(&mut pool, 100, start), None);
    assert!(one(&mut pool, 101, start + QUARANTINE).is_some());
}

fn pods(number: u8, range: &str) -> Owner {
    Owner::Pods(format!("edge-{number}").parse().unwrap(), range.parse().unwrap())
}

#[test]
fn blocks_are_aligned_and_do_not_overlap() {
    let mut virtual_addresses =
        VirtualAddresses::new("198.18.0.0/22".parse().unwrap(), "fd00::/112".parse().unwrap());
    let wanted = [
        pods(1, "10.244.1.0/24"),
        pods(2, "10.244.2.0/25"),
        pods(3, "10.244.3.0/24"),
        pods(4, "10.244.4.0/24"),
        owner(1),
        owner(2),
    ];
    let given = assign(&mut virtual_addresses, wanted.to_vec(), Instant::now());
    let text = |owner: &Owner| given[owner].map(|virtual_address| virtual_address.to_string());
    // The last addresses are reserved for the redirect; below them the blocks are packed, each aligned to its size.
    assert_eq!(text(&wanted[0]).as_deref(), Some("198.18.2.0"));
    assert_eq!(text(&wanted[1]).as_deref(), Some("198.18.3.0"));
    assert_eq!(text(&wanted[2]).as_deref(), Some("198.18.1.0"));
    assert_eq!(text(&wanted[3]), None, "no room is left above the single virtual addresses");
    assert_eq!(text(&wanted[4]).as_deref(), Some("198.18.0.2"));
}

#[test]
fn a_departed_block_is_reused_for_the_same_size() {
    let mut virtual_addresses =
        VirtualAddresses::new("198.18.0.0/23".parse().unwrap(), "fd00::/112".parse().unwrap());
    let start = Instant::now();
    let (first, second, half) =
        (pods(1, "10.244.1.0/25"), pods(2, "10.244.2.0/25"), pods(3, "10.244.3.0/26"));
    let block = |given: HashMap<Owner, Option<IpAddr>>, owner: &Owner| given[owner];
    let one = block(assign(&mut virtual_addresses, vec![first.clone()], start), &first);
    assert!(one.is_some());
    let two = block(assign(&mut virtual_addresses, vec![second.clone()], start), &second);
    assert!(two.is_some() && two != one);
    let later = start + QUARANTINE;
    let other = block(assign(&mut virtual_addresses, vec![second.clone(), half.clone()], later), &half);
    assert!(other.is_some() && other != one, "another size does not take it");
    let third = pods(4, "10.244.4.0/25");
    assert_eq!(block(assign(&mut virtual_addresses, vec![second, half, third.clone()], later), &third), one);
}

#[test]
fn what_an_earlier_server_assigned_stays() {
    let virtual_addresses =
        || VirtualAddresses::new("198.18.0.0/22".parse().unwrap(), "fd00::/112".parse().unwrap());
    let (mut before, start) = (virtual_addresses(), Instant::now());
    let wanted = vec![owner(1), owner(2), owner(3), pods(1, "10.244.1.0/24"), pods(2, "10.244.2.0/25")];
    let mut given = assign(&mut before, wanted.clone(), start);
    // The first has left in the meantime.
    let gone = given.remove(&wanted[0]).flatten().unwrap();
    let mut found: Vec<_> = wanted[1..].iter().map(|owner| (owner.net(), given[owner].unwrap())).collect();
    // Of another range, not aligned, of the other family, and a duplicate.
    for (net, virtual_address) in [
        ("10.9.0.0/32", "198.19.0.7"),
        ("10.9.1.0/24", "198.18.1.7"),
        ("10.9.2.0/32", "fd00::7"),
        ("10.9.3.0/32", "198.18.0.3"),
    ] {
        found.push((net.parse().unwrap(), virtual_address.parse().unwrap()));
    }
    let mut after = virtual_addresses();
    after.take_over(&found, |_| None, start);
    // Another call with nothing keeps the taken-over ones.
    after.take_over(&[], |_| None, start);
    let late = wanted[4].clone();
    let others = [wanted[1..4].to_vec(), vec![owner(4), pods(4, "10.244.4.0/25")]].concat();
    let again = assign(&mut after, others.clone(), start);
    assert!(wanted[1..4].iter().all(|owner| again[owner] == given[owner]), "{again:?}");
    assert_eq!(again[&owner(4)], Some(gone), "a hole is filled");
    let block = again[&others[4]];
    assert!(block.is_some() && block != given[&late], "{block:?}");
    let with_late = [others, vec![late.clone()]].concat();
    assert_eq!(assign(&mut after, with_late, start)[&late], given[&late], "it was kept for its owner");
}

/// A killed server has left virtual addresses, and the running one has assigned others.
#[test]
fn of_what_two_servers_assigned_the_first_counts() {
    let start = Instant::now();
    let net = |text: &str| text.parse::<IpNet>().unwrap();
    let virtual_address = |text: &str| text.parse::<IpAddr>().unwrap();
    let given = [
        (net("10.0.0.1/32"), virtual_address("198.18.0.9")),
        (net("10.0.0.2/32"), virtual_address("198.18.0.4")),
        (net("10.0.0.3/32"), virtual_address("198.18.2.7")),
    ];
    let left = [
        // Another virtual address of an address, a virtual address of another address, and a block that contains a virtual address.
        (net("10.0.0.1/32"), virtual_address("198.18.0.3")),
        (net("10.0.0.4/32"), virtual_address("198.18.0.4")),
        (net("10.244.5.0/24"), virtual_address("198.18.2.0")),
        (net("10.0.0.6/32"), virtual_address("198.18.0.3")),
    ];
    for at_once in [true, false] {
        let mut virtual_addresses =
            VirtualAddresses::new("198.18.0.0/22".parse().unwrap(), "fd00::/112".parse().unwrap());
        if at_once {
            virtual_addresses.take_over(&[&given[..], &left[..]].concat(), |_| None, start);
        } else {
            virtual_addresses.take_over(&given, |_| None, start);
            virtual_addresses.take_over(&left, |_| None, start);
        }
        let wanted = [owner(1), owner(2), owner(3), owner(4), owner(6), owner(7), pods(5, "10.244.5.0/24")];
        let assigned = assign(&mut virtual_addresses, wanted.to_vec(), start);
        let of = |number: u8| assigned[&owner(number)].map(|virtual_address| virtual_address.to_string());
        assert_eq!(of(1).as_deref(), Some("198.18.0.9"));
        assert_eq!(of(2).as_deref(), Some("198.18.0.4"));
        assert_eq!(of(3).as_deref(), Some("198.18.2.7"));
        assert_eq!(of(6).as_deref(), Some("198.18.0.3"), "nothing stands against it");
        // The holes are filled: virtual addresses that were not taken over are free.
        assert_eq!((of(4).as_deref(), of(7).as_deref()), (Some("198.18.0.2"), Some("198.18.0.5")));
        assert_eq!(assigned[&wanted[6]], Some(virtual_address("198.18.1.0")), "the last one that is whole");
    }
}

#[test]
fn another_node_does_not_inherit_a_virtual_address() {
    let (virtual_address, range): (IpAddr, IpNet) =
        ("198.18.0.2".parse().unwrap(), "10.244.1.0/24".parse().unwrap());
    let block: IpAddr = "198.18.1.0".parse().unwrap();
    let node: NodeName = "edge-1".parse().unwrap();
    let at = |node: &str| Owner::Node(node.parse().unwrap(), owner(1).net().addr());
    let mut virtual_addresses =
        VirtualAddresses::new("198.18.0.0/22".parse().unwrap(), "fd00::/112".parse().unwrap());
    let start = Instant::now();
    virtual_addresses.take_over(
        &[(owner(1).net(), virtual_address), (range, block)],
        |_| Some(node.clone()),
        start,
    );
    let others = [at("edge-2"), pods(2, "10.244.1.0/24")];
    let given = assign(&mut virtual_addresses, others.to_vec(), start);
    assert!(given[&others[0]].is_some_and(|other| other != virtual_address), "{given:?}");
    assert!(given[&others[1]].is_some_and(|other| other != block), "{given:?}");
    let contested = Owner::Contested(owner(1).net().addr());
    assert_ne!(
        assign(&mut virtual_addresses, vec![contested.clone()], start)[&contested],
        Some(virtual_address)
    );
    // It is kept for its node.
    let own = [at("edge-1"), pods(1, "10.244.1.0/24")];
    let given = assign(&mut virtual_addresses, own.to_vec(), start);
    assert_eq!((given[&own[0]], given[&own[1]]), (Some(virtual_address), Some(block)));
}

#[test]
fn found_virtual_addresses_without_an_owner_become_free_after_the_quarantine() {
    let (mut pool, start) = (pool(4), Instant::now());
    let found = u128::from(u32::from(Ipv4Addr::new(198, 18, 0, 2)));
    pool.take_over(vec![(owner(1).net(), found, None)], start);
    assert_eq!(one(&mut pool, 2, start).as_deref(), Some("198.18.0.3"));
    let both = |pool: &mut Pool, now| of_pool(pool, vec![owner(2), owner(3)], now)[1].1;
    assert_eq!(both(&mut pool, start + QUARANTINE - Duration::from_millis(1)), None);
    assert_eq!(both(&mut pool, start + QUARANTINE), Some(found));
}

#[test]
fn a_range_larger_than_the_virtual_addresses_gets_none() {
    let mut virtual_addresses =
        VirtualAddresses::new("198.18.0.0/24".parse().unwrap(), "fd00::/112".parse().unwrap());
    let wanted = [pods(1, "10.0.0.0/8"), pods(2, "fd01::/64"), pods(3, "::/0"), pods(4, "0.0.0.0/0")];
    let given = assign(&mut virtual_addresses, wanted.to_vec(), Instant::now());
    assert!(given.values().all(Option::is_none), "{given:?}");
}

#[test]
fn a_share_is_the_same_for_all_at_once_and_one_by_one() {
    let mut virtual_addresses =
        VirtualAddresses::new("198.18.0.0/15".parse().unwrap(), "fd00::/64".parse().unwrap());
    let address = |n: usize| IpAddr::from((0x0a00_0000 + u32::try_from(n).unwrap()).to_be_bytes());
    let node: NodeName = "edge-1".parse().unwrap();
    let range = |n: usize| IpNet::new(address(n * 256), 24).unwrap();
    let mut owners: Vec<_> = (0..NODE_SHARE + 2).map(|n| Owner::Node(node.clone(), address(n))).collect();
    owners.extend((0..NODE_SHARE_BLOCKS + 2).map(|n| Owner::Pods(node.clone(), range(n))));
    owners.extend((0..CONTESTED_SHARE + 2).map(|n| Owner::Contested(address(n))));
    owners.push(owner(9));
    let now = Instant::now();
    let without = |given: HashMap<Owner, Option<IpAddr>>| {
        let mut counts = [0; 3];
        for (owner, _) in given.iter().filter(|(_, virtual_address)| virtual_address.is_none()) {
            counts[match owner {
                Owner::Node(..) => 0,
                Owner::Pods(..) => 1,
                Owner::Contested(_) => 2,
            }] += 1;
        }
        counts
    };
    assert_eq!(without(assign(&mut virtual_addresses, owners.clone(), now)), [2, 2, 2]);
    assert_eq!(without(assign(&mut virtual_addresses, owners, now)), [2, 2, 2]);
    // Its earlier virtual addresses count until their quarantine ends.
    let other = vec![Owner::Node(node, address(1 << 20))];
    let almost = now + QUARANTINE - Duration::from_millis(1);
    assert_eq!(without(assign(&mut virtual_addresses, other.clone(), now)), [1, 0, 0]);
    assert_eq!(virtual_addresses.due(now), Some(now + QUARANTINE));
    assert_eq!(virtual_addresses.due(now + QUARANTINE), None);
    assert_eq!(without(assign(&mut virtual_addresses, other.clone(), almost)), [1, 0, 0]);
    assert_eq!(without(assign(&mut virtual_addresses, other, now + QUARANTINE)), [0, 0, 0]);
}

#[test]
fn the_second_virtual_address_of_a_range_is_never_assigned() {
    let virtual_addresses =
        VirtualAddresses::new("198.18.0.0/24".parse().unwrap(), "fd00::/112".parse().unwrap());
    let unassigned = |like: &str| virtual_addresses.unassigned(like.parse().unwrap()).to_string();
    assert_eq!((unassigned("10.8.0.7"), unassigned("fd00:8::7")), ("198.18.0.1".into(), "fd00::1".into()));
}

#[test]
fn whole_address_spaces_do_not_overflow() {
    let mut virtual_addresses =
        VirtualAddresses::new("128.0.0.0/1".parse().unwrap(), "::/0".parse().unwrap());
    let v6 = Owner::Contested("fd00::1".parse().unwrap());
    let assigned = assign(&mut virtual_addresses, vec![owner(1), v6.clone()], Instant::now());
    assert_eq!(assigned[&v6], Some("::2".parse().unwrap()));
    assert_eq!(assigned[&owner(1)], Some("128.0.0.2".parse().unwrap()));
}

#[test]
fn reserved_addresses_are_never_assigned() {
    let mut virtual_addresses =
        VirtualAddresses::new("198.18.0.0/24".parse().unwrap(), "fd00::/112".parse().unwrap());
    let assigned = assign(&mut virtual_addresses, (0..=255).map(owner).collect(), Instant::now());
    let given: HashSet<_> = assigned.values().flatten().collect();
    assert_eq!(given.len(), 256 - 16 - 2);
    assert!(!given.iter().any(|virtual_address| {
        reserved_addresses("198.18.0.0/24".parse().unwrap()).contains(match virtual_address {
            IpAddr::V4(v4) => v4,
            IpAddr::V6(_) => panic!("{virtual_address}"),
        })
    }));
}

proptest! {
    /// Virtual addresses are unique among present owners, stable while the owner is present, and not reused in quarantine.
    #[test]
    fn virtual_addresses_are_unique_stable_and_quarantined(rounds in prop::collection::vec((0u64..400, prop::collection::hash_set(0u8..12, 0..10)), 1..40)) {
        let mut pool = pool(31);
        let mut now = Instant::now();
        let mut last_use: HashMap<u128, (Owner, Instant)> = HashMap::new();
        let mut before: HashMap<Owner, u128> = HashMap::new();
        for (seconds, present) in rounds {
            // An owner that was present until now departs now at the earliest.
            now += Duration::from_secs(seconds);
            for (owner, virtual_address) in &before {
                last_use.insert(*virtual_address, (owner.clone(), now));
            }
            let assigned = of_pool(&mut pool, present.iter().map(|n| owner(*n)).collect(), now);
            prop_assert_eq!(assigned.len(), present.len());
            let mut seen = HashSet::new();
            for (owner, virtual_address) in &assigned {
                // 12 owners with their quarantine always fit into 29 virtual addresses.
                let virtual_address = virtual_address.unwrap();
                prop_assert!(seen.insert(virtual_address), "{virtual_address} twice");
                if let Some(kept) = before.get(owner) {
                    prop_assert_eq!(*kept, virtual_address);
                }
                if let Some((other, until)) = last_use.get(&virtual_address) {
                    prop_assert!(other == owner || now - *until >= QUARANTINE, "{} too early", virtual_address);
                }
            }
            before = assigned.into_iter().map(|(owner, virtual_address)| (owner, virtual_address.unwrap())).collect();
        }
    }
}

#[test]
fn the_reserved_block_is_the_end_of_the_range() {
    let reserved = |range: &str| reserved_addresses(range.parse::<Ipv4Net>().unwrap()).to_string();
    assert_eq!(reserved("198.18.0.0/15"), "198.19.255.0/24");
    assert_eq!(reserved("10.0.0.0/8"), "10.255.255.0/24");
    assert_eq!(reserved("198.18.0.0/24"), "198.18.0.240/28");
    let reserved = |range: &str| reserved_addresses_v6(range.parse().unwrap()).to_string();
    assert_eq!(reserved("fd00::/64"), "fd00::ffff:ffff:ffff:ff00/120");
    assert_eq!(reserved("fd00::/112"), "fd00::ff00/120");
}
