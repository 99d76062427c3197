use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::proto;

/// The base of the seeds of tokens hashes.
const SEED: u64 = 1337;

/// Returns the tokens hashes of a prompt's whole blocks, as `Stored.tokens_hashes` of the contract describes. An empty `lora`
/// or `salt` means none.
pub fn tokens_hashes(tokens: &[u32], block_size: usize, lora: &str, salt: &str) -> Vec<u64> {
    hash_blocks(tokens, block_size, lora, salt, false)
}

/// Returns the tokens hash of each whole block. EAGLE blocks have one token more, which is also the first token of the next
/// block.
fn hash_blocks(tokens: &[u32], block_size: usize, lora: &str, salt: &str, eagle: bool) -> Vec<u64> {
    let mut hashes = Vec::new();
    if block_size == 0 {
        return hashes;
    }
    let mut seed = SEED;
    if !lora.is_empty() {
        seed = seed.wrapping_add(xxh3_64(lora.as_bytes()));
    }
    if !salt.is_empty() {
        seed = seed.wrapping_add(xxh3_64_with_seed(salt.as_bytes(), 1));
    }
    let window = block_size.saturating_add(usize::from(eagle));
    let mut bytes = Vec::new();
    let mut rest = tokens;
    while rest.len() >= window {
        bytes.clear();
        bytes.extend(rest[..window].iter().flat_map(|token| token.to_le_bytes()));
        hashes.push(xxh3_64_with_seed(&bytes, seed));
        rest = &rest[block_size..];
    }
    hashes
}

/// A prompt to match. A [`View`](crate::View) and a server match it in the same way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    pub(crate) model: String,
    pub(crate) block_size: u32,
    pub(crate) text: Text,
}

/// What a prompt is given by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Text {
    Tokens(Tokens),
    TokensHashes(Vec<u64>),
    BlockHashes(Vec<u64>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tokens {
    ids: Vec<u32>,
    lora: String,
    salt: String,
    eagle: bool,
    exclude_last: bool,
}

impl Tokens {
    /// Returns the hashes of the blocks that may match.
    pub fn hashes(&self, block_size: u32) -> Vec<u64> {
        let size = block_size as usize;
        let mut hashes = hash_blocks(&self.ids, size, &self.lora, &self.salt, self.eagle);
        if self.exclude_last && size > 0 {
            hashes.truncate(self.ids.len().saturating_sub(1) / size);
        }
        hashes
    }
}

impl Prompt {
    fn new(text: Text) -> Self {
        Self { model: String::new(), block_size: 0, text }
    }

    /// Returns a prompt of token ids. Tokens after the last whole block are ignored.
    pub fn tokens(ids: impl Into<Vec<u32>>) -> Self {
        let (lora, salt) = (String::new(), String::new());
        Self::new(Text::Tokens(Tokens { ids: ids.into(), lora, salt, eagle: false, exclude_last: false }))
    }

    /// Returns a prompt of the tokens hashes of its blocks, see [`tokens_hashes`].
    pub fn tokens_hashes(hashes: impl Into<Vec<u64>>) -> Self {
        Self::new(Text::TokensHashes(hashes.into()))
    }

    /// Returns a prompt of the engine's own hashes of its blocks. Only workers whose engines have the same hashes match.
    pub fn block_hashes(hashes: impl Into<Vec<u64>>) -> Self {
        Self::new(Text::BlockHashes(hashes.into()))
    }

    /// Restricts the match to workers of a model. It should be set if there are several models, since equal token ids of
    /// different models are different text.
    pub fn model(mut self, model: impl Into<String>) -> Self {
        self.model = model.into();
        self
    }

    /// Restricts the match to workers with this number of tokens per block. By default, it is the block size of each
    /// worker.
    pub fn block_size(mut self, size: u32) -> Self {
        self.block_size = size;
        self
    }

    fn change(mut self, change: impl FnOnce(&mut Tokens)) -> Self {
        if let Text::Tokens(tokens) = &mut self.text {
            change(tokens);
        }
        self
    }

    /// Sets the name of the LoRA adapter. It applies to a prompt of token ids, as do the following.
    pub fn lora(self, name: impl Into<String>) -> Self {
        self.change(|t| t.lora = name.into())
    }

    /// Sets the cache salt.
    pub fn salt(self, salt: impl Into<String>) -> Self {
        self.change(|t| t.salt = salt.into())
    }

    /// Must be set for SGLang engines with EAGLE decoding: the hash of a block then includes the next token, so that the last
    /// block is whole only if a token follows it.
    pub fn eagle(self, eagle: bool) -> Self {
        self.change(|t| t.eagle = eagle)
    }

    /// Must be set to find what an engine reuses, which computes the last token of a prompt always.
    pub fn exclude_last_token(self, exclude: bool) -> Self {
        self.change(|t| t.exclude_last = exclude)
    }

    /// Returns the prompt as a message, without the model.
    pub(crate) fn to_proto(&self) -> proto::Prompt {
        let mut out = proto::Prompt { block_size: self.block_size, ..Default::default() };
        match &self.text {
            Text::Tokens(t) => {
                out.token_ids.clone_from(&t.ids);
                out.lora_name.clone_from(&t.lora);
                out.cache_salt.clone_from(&t.salt);
                (out.eagle, out.exclude_last_token) = (t.eagle, t.exclude_last);
            }
            Text::TokensHashes(hashes) => out.tokens_hashes.clone_from(hashes),
            Text::BlockHashes(hashes) => out.block_hashes.clone_from(hashes),
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hashes(prompt: &Prompt, size: u32) -> Vec<u64> {
        match &prompt.text {
            Text::Tokens(t) => t.hashes(size),
            _ => unreachable!(),
        }
    }

    #[test]
    fn hashes_of_the_contract() {
        let tokens: Vec<u32> = (1..=9).collect();
        assert_eq!(tokens_hashes(&tokens, 4, "", ""), [14643705804678351452, 16777012769546811212]);
        assert_eq!(tokens_hashes(&tokens, 4, "ada", ""), [9962148675397031925, 12185345747100175342]);
        assert_eq!(tokens_hashes(&tokens, 4, "", "salt")[..1], [15310320433733267740]);
        assert_eq!(tokens_hashes(&tokens, 0, "", ""), []);
        assert_eq!(tokens_hashes(&tokens, usize::MAX, "", ""), []);
    }

    #[test]
    fn the_last_token_and_eagle() {
        let p = Prompt::tokens((1..=8).collect::<Vec<_>>());
        assert_eq!(hashes(&p, 4).len(), 2);
        assert_eq!(hashes(&p.clone().exclude_last_token(true), 4).len(), 1);
        assert_eq!(hashes(&p.clone().eagle(true), 4).len(), 1);
        assert_eq!(hashes(&Prompt::tokens((1..=9).collect::<Vec<_>>()).eagle(true), 4).len(), 2);
        assert_eq!(hashes(&Prompt::tokens([]).exclude_last_token(true), 4).len(), 0);
        assert_ne!(hashes(&p, 4)[0], hashes(&p.eagle(true), 4)[0]);
    }
}
