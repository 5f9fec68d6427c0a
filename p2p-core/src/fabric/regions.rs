//! The registrations of a fabric whose device or library checks accesses. The id of a removed
//! registration does not name the next one in the same table entry.

use super::RegionId;

/// Registrations by id.
#[derive(Debug)]
pub struct RegionTable<T> {
    entries: Vec<Entry<T>>,
    free: Vec<u32>,
}

#[derive(Debug)]
struct Entry<T> {
    /// How often the entry was taken, modulo [`GENERATIONS`].
    generation: u32,
    item: Option<T>,
}

impl<T> Default for RegionTable<T> {
    fn default() -> Self {
        Self { entries: Vec::new(), free: Vec::new() }
    }
}

impl<T> RegionTable<T> {
    /// Adds an item. Returns `None` when the table is full, and drops the item.
    pub fn insert(&mut self, item: T) -> Option<RegionId> {
        let idx = match self.free.pop() {
            Some(idx) => idx,
            None if self.entries.len() < MAX_PLACES => {
                self.entries.push(Entry { generation: 0, item: None });
                self.entries.len() as u32 - 1
            }
            None => return None,
        };
        let entry = &mut self.entries[idx as usize];
        entry.generation = (entry.generation + 1) % GENERATIONS;
        entry.item = Some(item);
        Some(RegionId(idx | entry.generation << INDEX_BITS))
    }

    /// The item of a registration, if it exists.
    pub fn get(&self, id: RegionId) -> Option<&T> {
        let entry = self.entries.get((id.0 & INDEX_MASK) as usize)?;
        entry.item.as_ref().filter(|_| entry.generation == id.0 >> INDEX_BITS)
    }

    /// The item of a registration, if it exists.
    pub fn get_mut(&mut self, id: RegionId) -> Option<&mut T> {
        let entry = self.entries.get_mut((id.0 & INDEX_MASK) as usize)?;
        let is_meant = entry.generation == id.0 >> INDEX_BITS;
        entry.item.as_mut().filter(|_| is_meant)
    }

    /// Removes a registration.
    pub fn remove(&mut self, id: RegionId) -> Option<T> {
        self.get(id)?;
        let idx = id.0 & INDEX_MASK;
        self.free.push(idx);
        self.entries[idx as usize].item.take()
    }

    /// Tells why `id` names no registration.
    pub fn missing(&self, id: RegionId) -> String {
        let (idx, generation) = (id.0 & INDEX_MASK, id.0 >> INDEX_BITS);
        match self.entries.get(idx as usize) {
            // The first generation is 1.
            Some(entry) if generation != 0 => {
                let what = format!("registration {idx} of generation {generation}");
                match &entry.item {
                    None => format!("{what} was deregistered"),
                    Some(_) => format!(
                        "{what} was deregistered, and generation {} has its place",
                        entry.generation
                    ),
                }
            }
            _ => format!("there is no registration {idx} of generation {generation}"),
        }
    }
}

/// Bits of a [`RegionId`] that hold the index of its table entry.
pub const INDEX_BITS: u32 = 20;
/// Mask of these bits.
pub const INDEX_MASK: u32 = (1 << INDEX_BITS) - 1;
/// Number of registrations in one table entry before an id comes again.
pub const GENERATIONS: u32 = 1 << (32 - INDEX_BITS);
/// Largest number of registrations. The last index is left out, since it stands for none.
const MAX_PLACES: usize = INDEX_MASK as usize;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_does_not_name_its_successor() {
        let mut table = RegionTable::default();
        let (first, other) = (table.insert('a').unwrap(), table.insert('b').unwrap());
        assert_eq!((table.get(first), table.get(other)), (Some(&'a'), Some(&'b')));
        assert_eq!(table.remove(first), Some('a'));
        assert_eq!(table.missing(first), "registration 0 of generation 1 was deregistered");
        let next = table.insert('c').unwrap();
        assert_ne!(next, first);
        let named = table.missing(first);
        assert_eq!(
            named,
            "registration 0 of generation 1 was deregistered, and generation 2 has its place"
        );
        assert_eq!(table.get(first), None);
        assert_eq!(table.get_mut(first), None);
        assert_eq!(table.remove(first), None);
        assert_eq!(table.get_mut(next), Some(&mut 'c'));
        for unknown in [RegionId(2), RegionId(0), RegionId(u32::MAX)] {
            assert_eq!(table.get(unknown), None);
            assert_eq!(table.remove(unknown), None);
            assert!(table.missing(unknown).starts_with("there is no registration"));
        }
        // Entries are reused.
        for _ in 0..3 * GENERATIONS {
            let id = table.insert('d').unwrap();
            assert_eq!((id.0 & INDEX_MASK, table.remove(id)), (2, Some('d')));
        }
    }
}
