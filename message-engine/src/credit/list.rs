//! A queue of small indices. Any of them can be removed in constant time. Nothing allocates.

/// No index.
pub(super) const NONE: u32 = u32::MAX;

/// Indices in the order of their last push, each at most once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct List {
    links: Vec<Option<Link>>,
    first: u32,
    last: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Link {
    before: u32,
    after: u32,
}

impl List {
    /// An empty list of indices below `capacity`.
    pub(super) fn new(capacity: usize) -> Self {
        Self { links: vec![None; capacity], first: NONE, last: NONE }
    }

    pub(super) fn contains(&self, idx: u32) -> bool {
        self.links[idx as usize].is_some()
    }

    pub(super) fn first(&self) -> Option<u32> {
        (self.first != NONE).then_some(self.first)
    }

    /// Puts `idx` at the end, also if it is in the list already.
    pub(super) fn push_last(&mut self, idx: u32) {
        self.remove(idx);
        self.links[idx as usize] = Some(Link { before: self.last, after: NONE });
        match self.last {
            NONE => self.first = idx,
            last => self.link(last).after = idx,
        }
        self.last = idx;
    }

    /// Removes `idx`, if present.
    pub(super) fn remove(&mut self, idx: u32) {
        let Some(Link { before, after }) = self.links[idx as usize].take() else { return };
        match before {
            NONE => self.first = after,
            before => self.link(before).after = after,
        }
        match after {
            NONE => self.last = before,
            after => self.link(after).before = before,
        }
    }

    fn link(&mut self, idx: u32) -> &mut Link {
        // Neighbours are always linked, so the default is never used.
        self.links[idx as usize].get_or_insert(Link { before: NONE, after: NONE })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn behaves_like_a_deque(ops in prop::collection::vec((0u32..8, any::<bool>()), 0..200)) {
            let (mut list, mut model) = (List::new(8), VecDeque::new());
            for (idx, push) in ops {
                model.retain(|other| *other != idx);
                if push {
                    list.push_last(idx);
                    model.push_back(idx);
                } else {
                    list.remove(idx);
                }
                prop_assert_eq!(list.first(), model.front().copied());
                prop_assert_eq!(list.contains(idx), model.contains(&idx));
            }
        }
    }
}
