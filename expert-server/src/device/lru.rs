//! A small cache that evicts the least recently used value.

/// Values by key. Look-ups are linear: the cache is small.
#[derive(Debug)]
pub(super) struct LruCache<K, V> {
    /// The most recently used entry is the last.
    entries: Vec<(K, V)>,
    capacity: usize,
}

impl<K: PartialEq, V> LruCache<K, V> {
    pub(super) const fn new(capacity: usize) -> Self {
        Self { entries: Vec::new(), capacity }
    }

    /// Marks the value with this key as the most recently used. Returns false if there is none.
    pub(super) fn touch(&mut self, key: &K) -> bool {
        let found = self.entries.iter().rposition(|(of, _)| of == key);
        if let Some(idx) = found {
            self.entries[idx..].rotate_left(1);
        }
        found.is_some()
    }

    /// Adds a value as the most recently used. The cache must not contain its key. A full cache evicts its least
    /// recently used value.
    pub(super) fn insert(&mut self, key: K, value: V) {
        if self.entries.len() >= self.capacity {
            self.entries.remove(0);
        }
        self.entries.push((key, value));
    }

    /// The most recently used value.
    pub(super) fn newest(&self) -> Option<&V> {
        self.entries.last().map(|(_, value)| value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_recently_used_value_is_evicted() {
        let mut cache = LruCache::new(3);
        assert_eq!((cache.touch(&1), cache.newest()), (false, None));
        for key in [1, 2, 3] {
            cache.insert(key, key * 10);
        }
        assert!(cache.touch(&1));
        assert_eq!(cache.newest(), Some(&10));
        cache.insert(4, 40);
        assert!(!cache.touch(&2), "it was the least recently used");
        for key in [1, 3, 4, 4] {
            assert!(cache.touch(&key), "{key}");
            assert_eq!(cache.newest(), Some(&(key * 10)));
        }
    }
}
