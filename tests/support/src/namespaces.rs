//! Network namespaces joined by virtual links, which can lose packets and go down.

use std::process::Command;

/// A hub and some spokes, each a network namespace, with a link from the hub to every spoke. Gone when
/// dropped.
#[derive(Debug)]
pub struct Star {
    name: String,
    num_spokes: usize,
    is_owner: bool,
}

/// A namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Site {
    /// The namespace in the middle.
    Hub,
    /// A namespace around it.
    Spoke(usize),
}

impl Star {
    /// Makes the namespaces and the links, all of them up.
    ///
    /// # Errors
    /// Where this is not permitted, or the tools are missing.
    pub fn lay(num_spokes: usize) -> Result<Self, String> {
        let name = format!("sy{}", rand::random::<u16>());
        let star = Self { name, num_spokes, is_owner: true };
        match star.set_up() {
            Ok(()) => Ok(star),
            Err(error) => Err(format!("needs root, iproute2 and network namespaces: {error}")),
        }
    }

    /// The star of the process that started this one, by its [`name`](Self::name).
    #[must_use]
    pub fn of_parent(name: &str, num_spokes: usize) -> Self {
        Self { name: name.to_owned(), num_spokes, is_owner: false }
    }

    /// For [`of_parent`](Self::of_parent).
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// `program`, to be run at `site`.
    #[must_use]
    pub fn command(&self, site: Site, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.namespace(site), program]);
        command
    }

    /// Address of the hub on the link to `spoke`.
    #[must_use]
    pub fn hub_address(&self, spoke: usize) -> String {
        format!("10.201.{}.1", 77 + spoke)
    }

    /// Address of a spoke.
    #[must_use]
    pub fn spoke_address(&self, spoke: usize) -> String {
        format!("10.201.{}.2", 77 + spoke)
    }

    /// Takes the link of a spoke down, at the spoke's end, or up again.
    ///
    /// # Errors
    /// With the message of `ip`.
    pub fn set_link(&self, spoke: usize, is_up: bool) -> Result<(), String> {
        let site = Site::Spoke(spoke);
        let (namespace, end) = (self.namespace(site), self.interface(site, spoke));
        run(&format!("ip -n {namespace} link set {end} {}", if is_up { "up" } else { "down" }))
    }

    /// Drops every packet that arrives anywhere with this chance.
    ///
    /// # Errors
    /// With the message of `nft`.
    pub fn lose(&self, percent: u32) -> Result<(), String> {
        for site in self.sites() {
            let nft = format!("ip netns exec {} nft", self.namespace(site));
            run(&format!("{nft} add table inet loss"))?;
            run(&format!(
                "{nft} add chain inet loss in {{ type filter hook input priority 0 ; }}"
            ))?;
            // Packets of a host to itself are not lost.
            run(&format!("{nft} add rule inet loss in iif lo accept"))?;
            let some = format!("numgen random mod 100 < {percent} ");
            let which = if percent < 100 { &some } else { "" };
            run(&format!("{nft} add rule inet loss in {which}counter drop"))?;
        }
        Ok(())
    }

    /// Packets that were lost so far.
    ///
    /// # Errors
    /// With the message of `nft`.
    pub fn num_lost(&self) -> Result<u64, String> {
        let mut num_lost = 0;
        for site in self.sites() {
            let nft = format!("ip netns exec {} nft list table inet loss", self.namespace(site));
            let rules = output(&nft)?;
            let counted = rules
                .split("counter packets ")
                .nth(1)
                .and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
            num_lost += counted.ok_or_else(|| format!("no counter in `{rules}`"))?;
        }
        Ok(num_lost)
    }

    fn sites(&self) -> impl Iterator<Item = Site> + use<> {
        std::iter::once(Site::Hub).chain((0..self.num_spokes).map(Site::Spoke))
    }

    fn namespace(&self, site: Site) -> String {
        match site {
            Site::Hub => format!("{}h", self.name),
            Site::Spoke(spoke) => format!("{}s{spoke}", self.name),
        }
    }

    fn interface(&self, site: Site, spoke: usize) -> String {
        format!("{}{}{spoke}", self.name, if site == Site::Hub { 'h' } else { 's' })
    }

    fn set_up(&self) -> Result<(), String> {
        for site in self.sites() {
            let namespace = self.namespace(site);
            run(&format!("ip netns add {namespace}"))?;
            run(&format!("ip -n {namespace} link set lo up"))?;
        }
        let hub = self.namespace(Site::Hub);
        for spoke in 0..self.num_spokes {
            let there = self.namespace(Site::Spoke(spoke));
            let ends = [Site::Hub, Site::Spoke(spoke)].map(|site| self.interface(site, spoke));
            let [near, far] = &ends;
            run(&format!(
                "ip link add {near} netns {hub} type veth peer name {far} netns {there}"
            ))?;
            let near = (&hub, near, self.hub_address(spoke));
            for (namespace, end, address) in [near, (&there, far, self.spoke_address(spoke))] {
                run(&format!("ip -n {namespace} addr add {address}/24 dev {end}"))?;
                run(&format!("ip -n {namespace} link set {end} up"))?;
            }
        }
        Ok(())
    }
}

/// A handle for other threads: it removes nothing.
impl Clone for Star {
    fn clone(&self) -> Self {
        Self::of_parent(&self.name, self.num_spokes)
    }
}

impl Drop for Star {
    fn drop(&mut self) {
        if self.is_owner {
            for site in self.sites() {
                // A namespace that was never made cannot be removed.
                let _ = run(&format!("ip netns del {}", self.namespace(site)));
            }
        }
    }
}

fn run(line: &str) -> Result<(), String> {
    output(line).map(drop)
}

/// Runs a line whose words are separated by single spaces. Returns its output.
fn output(line: &str) -> Result<String, String> {
    let mut words = line.split(' ');
    let output = Command::new(words.next().unwrap_or_default())
        .args(words)
        .output()
        .map_err(|error| format!("{line}: {error}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(format!("{line}: {}", String::from_utf8_lossy(&output.stderr).trim()))
}
