//! Places of experts that are being loaded. Several threads load at a time.

use std::mem::ManuallyDrop;

use super::*;

/// The use of a local index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    Free,
    /// An expert is being loaded there.
    Reserved(u32),
    Held(u32),
    /// A copy there did not end: it is never used again.
    Lost,
}

/// A place for an expert that is being loaded. Dropping it before [`publish`](Self::publish) frees the place.
pub(super) struct Reservation<'a> {
    store: &'a DeviceStore,
    uploader: ManuallyDrop<Uploader>,
    /// The block that the expert is copied to. A larger one may replace it meanwhile.
    memory: Arc<LayerMemory>,
    layer: u32,
    expert: u32,
    local_idx: usize,
    /// The weights are rounded from another form. The loader sets this before [`publish`](Self::publish).
    pub(super) is_widened: bool,
    is_published: bool,
    /// The uploader's buffers are never used again nor freed.
    leaks_buffers: bool,
}

impl DeviceStore {
    /// A place for an expert; `None` if it is loaded already. Then it is in service.
    ///
    /// # Errors
    /// The model has no such layer, the expert is being loaded, or the GPU refuses memory.
    pub(super) fn reserve(
        &self,
        layer: u32,
        expert: u32,
    ) -> Result<Option<Reservation<'_>>, LoadError> {
        let unknown =
            |what: &str| LoadError::Device(format!("layer {layer} expert {expert}: {what}").into());
        let uploader = lock(&self.uploaders).pop();
        let mut uploader =
            uploader.map_or_else(|| Uploader::new(&self.gpu), Ok).map_err(refused)?;
        let mut all = lock(&self.places);
        let old = self.tables();
        if old.find(layer, expert).is_some() {
            drop(all);
            lock(&self.uploaders).push(uploader);
            // An earlier call may have reached its deadline before the expert was in service.
            self.announce(old.version)?;
            return Ok(None);
        }
        let (Some(places), Some(table)) =
            (all.get_mut(layer as usize), old.layers.get(layer as usize))
        else {
            return Err(unknown("the model has no such layer"));
        };
        if expert >= self.plan.num_experts {
            return Err(unknown("the model has no such expert"));
        }
        if places.contains(&Place::Reserved(expert)) {
            return Err(unknown("it is being loaded by another thread"));
        }
        let free = places.iter().position(|place| *place == Place::Free);
        let local_idx = free.unwrap_or(places.len());
        let memory = match &table.memory {
            Some(memory) if local_idx < memory.capacity() => Arc::clone(memory),
            memory => {
                let memory = self.grow(&mut uploader, memory.as_ref(), places)?;
                let mut new = ExpertTables::clone(&old);
                new.version += 1;
                if let Some(table) = new.layers.get_mut(layer as usize) {
                    table.memory = Some(Arc::clone(&memory));
                }
                self.tables.store(Arc::new(new));
                memory
            }
        };
        match places.get_mut(local_idx) {
            Some(place) => *place = Place::Reserved(expert),
            None => places.push(Place::Reserved(expert)),
        }
        let uploader = ManuallyDrop::new(uploader);
        let is_published = false;
        Ok(Some(Reservation {
            store: self,
            uploader,
            memory,
            layer,
            expert,
            local_idx,
            is_widened: false,
            is_published,
            leaks_buffers: false,
        }))
    }

    /// A larger block for a layer, with the experts that the old one holds.
    fn grow(
        &self,
        uploader: &mut Uploader,
        old: Option<&Arc<LayerMemory>>,
        places: &[Place],
    ) -> Result<Arc<LayerMemory>, LoadError> {
        let num_used = places.len();
        let capacity = (num_used + num_used.div_ceil(8).max(1)).min(self.plan.num_experts as usize);
        let capacity = capacity.max(num_used + 1);
        let needed_bytes = capacity as u64 * self.shape.expert_bytes();
        self.plan.check_memory(&self.gpu, "a layer's experts with one more", needed_bytes)?;
        let id = self.next_block.fetch_add(1, Ordering::Relaxed);
        let new = LayerMemory::new(&self.gpu, &self.shape, capacity, id).map_err(refused)?;
        let new = Arc::new(new);
        let held = places.iter().enumerate().filter(|(_, place)| matches!(place, Place::Held(_)));
        let mut copies = held.map(|(local_idx, _)| local_idx);
        if let Some(old) = old {
            let copied = copies.try_for_each(|idx| copy_expert(uploader, &new, old, idx));
            if let Err(error) = copied.and_then(|()| uploader.wait()) {
                drop_after_copies(uploader, (new, Arc::clone(old)));
                return Err(refused(error));
            }
        }
        let mut blocks = lock(&self.blocks);
        blocks.retain(|_, block| block.strong_count() > 0);
        blocks.insert(id, Arc::downgrade(&new));
        Ok(new)
    }
}

impl Reservation<'_> {
    /// For the copies: they must go to this place of this memory only.
    pub(super) fn parts(&mut self) -> (&mut Uploader, &LayerMemory, usize) {
        (&mut self.uploader, &self.memory, self.local_idx)
    }

    /// Keeps the uploader's buffers for ever, because they may still be written.
    pub(super) const fn keep_buffers(&mut self) {
        self.leaks_buffers = true;
    }

    /// Waits for the copies, and puts the expert into service. Returns its bytes.
    pub(super) fn publish(mut self) -> Result<u64, LoadError> {
        self.uploader.wait().map_err(refused)?;
        let (store, layer) = (self.store, self.layer as usize);
        let mut all = lock(&store.places);
        let old = store.tables();
        let current = old.layers.get(layer).and_then(|table| table.memory.as_ref());
        if let Some(current) = current.filter(|current| !Arc::ptr_eq(current, &self.memory)) {
            copy_expert(&mut self.uploader, current, &self.memory, self.local_idx)
                .and_then(|()| self.uploader.wait())
                .map_err(refused)?;
        }
        let mut new = ExpertTables::clone(&old);
        new.version += 1;
        let version = new.version;
        if let Some(place) = all.get_mut(layer).and_then(|places| places.get_mut(self.local_idx)) {
            *place = Place::Held(self.expert);
        }
        if let Some(table) = new.layers.get_mut(layer) {
            table.places.resize(table.places.len().max(self.local_idx + 1), None);
            table.places[self.local_idx] = Some(self.expert);
        }
        if self.is_widened {
            lock(&store.widened).insert((self.layer, self.expert));
        }
        store.tables.store(Arc::new(new));
        drop(all);
        self.is_published = true;
        store.announce(version)?;
        // Frees the old block here, if this was its last use, because freeing waits for the GPU.
        drop(old);
        Ok(store.shape.expert_bytes())
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        if !self.is_published {
            // The place and its memory are used again only when no copy runs. The expert may come to another place.
            let ended = self.uploader.wait();
            let mut all = lock(&self.store.places);
            let places = all.get_mut(self.layer as usize);
            if let Some(place) = places.and_then(|places| places.get_mut(self.local_idx)) {
                *place = if ended.is_ok() { Place::Free } else { Place::Lost };
            }
            if let Err(error) = ended {
                tracing::error!(%error, "copies of weights did not end: their memory is not freed");
                std::mem::forget(Arc::clone(&self.memory));
                return;
            }
        }
        if self.leaks_buffers {
            return;
        }
        // SAFETY: not used after this.
        let uploader = unsafe { ManuallyDrop::take(&mut self.uploader) };
        lock(&self.store.uploaders).push(uploader);
    }
}

/// Starts to copy an expert from one block of a layer to another.
fn copy_expert(
    uploader: &mut Uploader,
    to: &LayerMemory,
    from: &LayerMemory,
    local_idx: usize,
) -> Result<(), GpuError> {
    for part in Part::ALL {
        let bytes = to.layout().part_bytes(part);
        let (to, from) = (to.at(part, local_idx)?, from.at(part, local_idx)?);
        // SAFETY: both blocks have so many bytes. A loaded expert is never written again, and no kernel uses this
        // place of the new block yet. Neither block is freed before the copy has ended.
        unsafe { uploader.copy_within_gpu(to, from, bytes)? };
    }
    Ok(())
}
