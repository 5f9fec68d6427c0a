//! A few values by key, of which those used longest ago go first.

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Recent<K, V> {
    /// The one that was used last comes last.
    entries: Vec<(K, V)>,
    most: usize,
}

impl<K: PartialEq, V> Recent<K, V> {
    /// Room for `most` values.
    pub(super) const fn new(most: usize) -> Self {
        Self { entries: Vec::new(), most }
    }

    /// Makes the value with this key the newest. `false` if there is none.
    pub(super) fn renew(&mut self, key: &K) -> bool {
        let found = self.entries.iter().rposition(|(of, _)| of == key);
        if let Some(idx) = found {
            self.entries[idx..].rotate_left(1);
        }
        found.is_some()
    }

    /// Adds the newest value, whose key there is none of. It takes the place of the oldest where there is no room.
    pub(super) fn push(&mut self, key: K, value: V) {
        if self.entries.len() >= self.most {
            self.entries.remove(0);
        }
        self.entries.push((key, value));
    }

    pub(super) fn newest(&self) -> Option<&V> {
        self.entries.last().map(|(_, value)| value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_used_longest_ago_goes_first() {
        let mut recent = Recent::new(3);
        assert_eq!((recent.renew(&1), recent.newest()), (false, None));
        for key in [1, 2, 3] {
            recent.push(key, key * 10);
        }
        assert!(recent.renew(&1));
        assert_eq!(recent.newest(), Some(&10));
        recent.push(4, 40);
        assert!(!recent.renew(&2), "nobody has used it for longest");
        for key in [1, 3, 4, 4] {
            assert!(recent.renew(&key), "{key}");
            assert_eq!(recent.newest(), Some(&(key * 10)));
        }
    }
}
