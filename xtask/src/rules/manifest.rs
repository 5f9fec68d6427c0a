//! The parts of a `Cargo.toml` that the folder rules read, with line numbers.

/// A manifest.
#[derive(Debug, Default)]
pub struct Manifest {
    /// `[package] name`.
    pub package: String,
    /// `[lib] name`, or the package's name with underscores.
    pub library: String,
    /// Folders of `[workspace] members`.
    pub members: Vec<String>,
    /// Entries of `[workspace.dependencies]`.
    pub shared: Vec<Dependency>,
    /// Normal and build dependencies, for all targets.
    pub dependencies: Vec<Dependency>,
    /// Development dependencies, for all targets.
    pub dev_dependencies: Vec<Dependency>,
}

/// One line of a table of dependencies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dependency {
    /// Line in the manifest, from 1.
    pub line: usize,
    /// The name that sources use, with the dashes of the manifest.
    pub key: String,
    /// `package`, or the key.
    pub package: String,
    /// `path`, relative to the manifest's folder.
    pub path: Option<String>,
    /// `workspace = true`.
    pub is_shared: bool,
    /// `optional = true`.
    pub is_optional: bool,
}

impl Manifest {
    /// Reads what this workspace uses of TOML: one entry a line, arrays of strings over several.
    pub fn parse(text: &str) -> Self {
        let mut manifest = Self::default();
        let mut section = String::new();
        let mut is_in_members = false;
        for (idx, line) in text.lines().enumerate() {
            let line = without_comment(line).trim();
            if is_in_members {
                manifest.members.extend(strings(line));
                is_in_members = !line.contains(']');
            } else if let Some(name) = line.strip_prefix('[') {
                section = name.trim_end_matches(']').to_owned();
                // `[dependencies.name]` is an entry of its own; its keys follow.
                if let (Some(table), Some(key)) = manifest.open_entry(&section) {
                    table.push(Dependency::new(idx + 1, key));
                }
            } else if let Some((key, value)) = line.split_once('=') {
                let (key, value) = (key.trim().trim_matches('"'), value.trim());
                match (section.as_str(), key) {
                    ("package", "name") => manifest.package = unquoted(value),
                    ("lib", "name") => manifest.library = unquoted(value),
                    ("workspace", "members") => {
                        manifest.members.extend(strings(value));
                        is_in_members = !value.contains(']');
                    }
                    _ => match manifest.open_entry(&section) {
                        (Some(table), None) => {
                            let (key, value) = match key.split_once('.') {
                                Some((key, field)) => (key, format!("{{ {field} = {value} }}")),
                                None => (key, value.to_owned()),
                            };
                            let mut dependency = Dependency::new(idx + 1, key);
                            inline_fields(&value)
                                .for_each(|(field, value)| dependency.set(&field, &value));
                            table.push(dependency);
                        }
                        (Some(table), Some(_)) => {
                            if let Some(last) = table.last_mut() {
                                last.set(key, value);
                            }
                        }
                        _ => {}
                    },
                }
            }
        }
        if manifest.library.is_empty() {
            manifest.library = manifest.package.replace('-', "_");
        }
        manifest
    }

    /// The table that a section belongs to, and the key where the section is a single entry of it.
    fn open_entry<'a>(
        &mut self,
        section: &'a str,
    ) -> (Option<&mut Vec<Dependency>>, Option<&'a str>) {
        let section = match section.strip_prefix("target.") {
            // `target.'cfg(…)'.dependencies`
            Some(rest) => rest.rfind(['\'', '"']).map_or(section, |at| &rest[at + 2..]),
            None => section,
        };
        let (name, key) = match section.strip_prefix("workspace.") {
            Some(rest) => match rest.split_once('.') {
                Some((_, key)) => ("workspace.dependencies", Some(key)),
                None => (section, None),
            },
            None => match section.split_once('.') {
                Some((name, key)) => (name, Some(key)),
                None => (section, None),
            },
        };
        let table = match name {
            "workspace.dependencies" => Some(&mut self.shared),
            "dependencies" | "build-dependencies" => Some(&mut self.dependencies),
            "dev-dependencies" => Some(&mut self.dev_dependencies),
            _ => None,
        };
        (table, key)
    }
}

impl Dependency {
    fn new(line: usize, key: &str) -> Self {
        let (key, package) = (key.to_owned(), key.to_owned());
        Self { line, key, package, path: None, is_shared: false, is_optional: false }
    }

    fn set(&mut self, field: &str, value: &str) {
        match field {
            "package" => self.package = unquoted(value),
            "path" => self.path = Some(unquoted(value)),
            "workspace" => self.is_shared = value == "true",
            "optional" => self.is_optional = value == "true",
            _ => {}
        }
    }
}

/// `{ a = "x", b = true }` as pairs; nothing for a plain version.
fn inline_fields(value: &str) -> impl Iterator<Item = (String, String)> {
    let inner = value.strip_prefix('{').and_then(|rest| rest.strip_suffix('}')).unwrap_or_default();
    // Commas inside of arrays separate nothing here: no field of interest is an array.
    inner.split(',').filter_map(|field| {
        let (key, value) = field.split_once('=')?;
        Some((key.trim().to_owned(), value.trim().to_owned()))
    })
}

fn unquoted(value: &str) -> String {
    value.trim().trim_matches(['"', '\'']).to_owned()
}

fn strings(value: &str) -> Vec<String> {
    value.split('"').skip(1).step_by(2).map(str::to_owned).collect()
}

/// The line up to a `#` that no string contains.
fn without_comment(line: &str) -> &str {
    let mut is_quoted = false;
    let end = line.find(|c| {
        is_quoted ^= c == '"';
        c == '#' && !is_quoted
    });
    &line[..end.unwrap_or(line.len())]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependencies_have_their_line() {
        let manifest = Manifest::parse(
            "[package]\nname = \"switchyard-a\"\n\n[dependencies]\nb.workspace = true\n\
             c = { package = \"switchyard-c\", path = \"../c\", optional = true, features = [\"x\", \"y\"] } # why\n\
             [target.'cfg(loom)'.dependencies]\nloom = \"1\"\n[dependencies.d]\noptional = true\n\
             [dev-dependencies]\ne = \"1\"\n[features]\nf = [\"c\"]\n",
        );
        assert_eq!(manifest.library, "switchyard_a");
        let found: Vec<_> = manifest
            .dependencies
            .iter()
            .map(|d| (d.line, d.key.as_str(), d.package.as_str(), d.is_shared, d.is_optional))
            .collect();
        assert_eq!(
            found,
            [
                (5, "b", "b", true, false),
                (6, "c", "switchyard-c", false, true),
                (8, "loom", "loom", false, false),
                (9, "d", "d", false, true),
            ]
        );
        assert_eq!(manifest.dependencies[1].path.as_deref(), Some("../c"));
        assert_eq!(manifest.dev_dependencies.len(), 1);
    }

    #[test]
    fn a_workspace_has_members_and_shared_dependencies() {
        let manifest = Manifest::parse(
            "[workspace]\nmembers = [\n    \"a\", # first\n    \"b/c\",\n]\n\n[workspace.dependencies]\n\
             a = { package = \"switchyard-a\", path = \"a\" }\n",
        );
        assert_eq!(manifest.members, ["a", "b/c"]);
        assert_eq!(manifest.shared[0].path.as_deref(), Some("a"));
        assert_eq!(manifest.shared[0].package, "switchyard-a");
    }
}
