//! Commands of users to the engine's thread.

use std::time::Instant;

use super::Io;
use super::address::start_connecting;
use super::handshake::ConnectCaller;
use crate::engine::error::{CloseReason, ConnectError, TransferError};
use crate::engine::link::LocalRange;
use crate::engine::shared::{Command, ConnKey, Operation, Register, TransferPart};

impl Io {
    /// Executes commands of users. Returns whether there were any.
    pub(super) fn execute_commands(&mut self) -> bool {
        let mut is_busy = false;
        if let Some(deferred) = self.shared.take_deferred() {
            is_busy = true;
            for (idx, is_full) in deferred.released {
                self.registry.deregister_abandoned(&mut self.fabrics, idx, is_full);
            }
            for (key, reason) in deferred.closed {
                if self.connection(key).is_some() {
                    self.close(key.idx, &reason);
                }
            }
            for key in deferred.lost {
                if let Some(connection) = self.connection(key) {
                    let (fabric, peer) = (connection.peer.fabric, connection.peer.id);
                    self.on_peer_lost(fabric, peer);
                }
            }
            for key in deferred.taken {
                self.open_notify_window(key);
            }
        }
        for _ in 0..MAX_COMMANDS {
            let Some(command) = self.shared.queue.pop() else { break };
            is_busy = true;
            self.execute(command);
        }
        is_busy
    }

    fn execute(&mut self, command: Command) {
        match command {
            Command::Transfer(part) => self.start_part(part),
            Command::Notify { conn, transfer, deadline_ns, notification } => {
                if !self.with_connection(conn, |link, ports| {
                    link.notify(ports, transfer, deadline_ns, notification);
                }) {
                    self.fail_disconnected(conn, transfer, "notify");
                }
            }
            Command::Connect { addr, options, deadline, reply } => {
                self.begin_connect(deadline, ConnectCaller { addr, options, reply });
            }
            Command::Register(Register { ptr, bytes, access, source, reply }) => {
                let fabrics = &mut self.fabrics;
                // SAFETY: the caller of `Engine::reg` has promised that the memory stays mapped, or
                // `source` holds it.
                let keys = unsafe { self.registry.acquire(fabrics, ptr, bytes, access, source) };
                if let Err(Ok(keys)) = reply.push(keys) {
                    // The caller has timed out, so no handle would ever release the registration.
                    let is_full = keys.covers(ptr, bytes);
                    self.registry.deregister_abandoned(&mut self.fabrics, keys.idx, is_full);
                }
            }
            Command::Release { idx, is_full, reply } => {
                self.registry.deregister(&mut self.fabrics, idx, is_full, reply);
            }
            Command::Stop => self.is_stopping = true,
        }
    }

    fn start_part(&mut self, part: TransferPart) {
        let TransferPart { conn, operation, transfer, deadline_ns, handle, offset, bytes } = part;
        let Some(connection) = self.connection(conn) else {
            drop(handle);
            return self.fail_disconnected(conn, transfer, operation.name());
        };
        let Some(region) = handle.keys.region(connection.peer.fabric) else {
            drop(handle);
            let detail = "the memory is not registered with this transport any more".into();
            let error = TransferError::Fabric { op: operation.name(), code: 0, detail };
            return self.shared.transfers.finish(transfer, Err(error));
        };
        let local = LocalRange { hold: handle, region, offset, bytes };
        self.with_connection(conn, |link, ports| match operation {
            Operation::Send => link.send(ports, transfer, deadline_ns, local),
            Operation::Recv => link.recv(ports, transfer, deadline_ns, local),
            Operation::Write(remote) => link.write(ports, transfer, deadline_ns, local, remote),
            Operation::Read(remote) => link.read(ports, transfer, deadline_ns, local, remote),
        });
    }

    /// Fails a transfer whose connection has ended.
    fn fail_disconnected(&self, conn: ConnKey, transfer: u32, op: &'static str) {
        let known = self.ended.iter().find(|(serial, _)| *serial == conn.serial);
        let reason = known.map_or(CloseReason::Local, |(_, reason)| reason.clone());
        let error = TransferError::Disconnected { op, reason };
        self.shared.transfers.finish(transfer, Err(error));
    }

    fn begin_connect(&mut self, deadline: Instant, caller: ConnectCaller) {
        let stream = start_connecting(caller.addr);
        if let Err((error, Some(caller))) = self.place(deadline, Some(caller), stream) {
            let (addr, detail) = (caller.addr.to_string(), error.to_string());
            let _ = caller.reply.push(Err(ConnectError::Unreachable { addr, detail }));
        }
    }

    fn open_notify_window(&mut self, key: ConnKey) {
        if let Some(conn) =
            self.connection(key).and_then(|connection| connection.peer.conn.upgrade())
        {
            let taken = conn.all_taken();
            self.with_connection(key, |link, _| link.taken(taken));
        }
    }
}

/// Commands executed in one round, before sockets and fabrics get their turn.
const MAX_COMMANDS: usize = 256;
