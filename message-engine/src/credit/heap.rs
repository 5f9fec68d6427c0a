//! A binary heap of small indices by key. Any of them can be removed or get a new key. Nothing allocates.

use super::list::NONE;

/// Indices by key, the least first. Of equal keys, the lower index comes first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Heap {
    entries: Vec<(u64, u32)>,
    /// Position of each index in `entries`.
    places: Vec<u32>,
}

impl Heap {
    /// An empty heap of indices below `capacity`.
    pub(super) fn new(capacity: usize) -> Self {
        Self { entries: Vec::with_capacity(capacity), places: vec![NONE; capacity] }
    }

    pub(super) fn first(&self) -> Option<u32> {
        self.entries.first().map(|(_, idx)| *idx)
    }

    /// Inserts `idx` with `key`, or changes its key.
    pub(super) fn set(&mut self, idx: u32, key: u64) {
        let place = match self.places[idx as usize] {
            NONE => {
                self.entries.push((key, idx));
                self.places[idx as usize] = (self.entries.len() - 1) as u32;
                self.entries.len() - 1
            }
            place => {
                self.entries[place as usize].0 = key;
                place as usize
            }
        };
        self.restore(place);
    }

    /// Removes `idx`, if present.
    pub(super) fn remove(&mut self, idx: u32) {
        let place = self.places[idx as usize];
        if place == NONE {
            return;
        }
        self.places[idx as usize] = NONE;
        self.entries.swap_remove(place as usize);
        if let Some((_, moved)) = self.entries.get(place as usize) {
            self.places[*moved as usize] = place;
            self.restore(place as usize);
        }
    }

    /// Restores the order of the heap for the entry at `place`.
    fn restore(&mut self, mut place: usize) {
        while place > 0 && self.entries[place] < self.entries[(place - 1) / 2] {
            self.swap(place, (place - 1) / 2);
            place = (place - 1) / 2;
        }
        loop {
            let least = (2 * place + 1..=2 * place + 2)
                .filter(|child| *child < self.entries.len())
                .min_by_key(|child| self.entries[*child]);
            match least {
                Some(child) if self.entries[child] < self.entries[place] => {
                    self.swap(place, child);
                    place = child;
                }
                _ => break,
            }
        }
    }

    fn swap(&mut self, a: usize, b: usize) {
        self.entries.swap(a, b);
        for place in [a, b] {
            self.places[self.entries[place].1 as usize] = place as u32;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_first_is_the_least(ops in prop::collection::vec((0u32..12, 0u64..6, any::<bool>()), 0..300)) {
            let (mut heap, mut model) = (Heap::new(12), BTreeMap::new());
            for (idx, key, set) in ops {
                if set {
                    heap.set(idx, key);
                    model.insert(idx, key);
                } else {
                    heap.remove(idx);
                    model.remove(&idx);
                }
                let least = model.iter().map(|(idx, key)| (*key, *idx)).min().map(|(_, idx)| idx);
                prop_assert_eq!(heap.first(), least);
            }
        }
    }
}
